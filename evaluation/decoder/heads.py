"""Drafters that are heads on the target: they draw on what the target computed instead of reading the text
anew. What Medusa and EAGLE have in common, in training and in measuring: their drafts over finished text.

Shapes: B samples, T positions, H the target's hidden size, F width of the features that a kind draws on, N
completion tokens of the batch in row-major order.

Everywhere in here the state at position i predicts the token at i + 2: the target's state at i gives the
token at i + 1, which the target has emitted itself when drafting begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


class HeadModel(PreTrainedModel):
    """The weights of such a drafter. It owns no embeddings: where it needs some they are the target's."""

    base_model_prefix = "model"
    _supports_sdpa = True
    _supports_attention_backend = True

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The target's layers whose inputs it draws on; none where it takes the last hidden state."""
        return ()

    def head(self, step: int) -> nn.Linear:
        """The head `[Vd, H]` of drafted token number `step` (from 0)."""
        raise NotImplementedError

    def get_output_embeddings(self) -> nn.Module:
        """The head of the first drafted token."""
        return self.head(0)

    def get_input_embeddings(self) -> nn.Module:
        raise NotImplementedError("a head on the target has no embeddings of its own")

    def rollout(self, text: Text) -> Iterator[Tensor]:
        """The states `[B, T, H]` of each drafted token in turn, when drafting begins at every position at
        once and what was drafted before is the text itself.

        Number k's state at position i predicts the token at i + 2, drafted from what the target had computed
        up to i - k.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Text:
    """Finished text as a head reads it."""

    embeddings: Tensor
    """`[B, T, H]`: the target's embedding of the token at i + 1 (the last one is never used)."""
    features: Tensor
    """`[B, T, F]`: what the target computed at i."""
    known: Tensor | None = None
    """bool `[B, T]`: where there are features; None for everywhere."""


@dataclass(frozen=True)
class Drafted:
    """The states of one drafted token over finished text, at those completion tokens that it reaches."""

    states: Tensor
    """`[n, H]`."""
    kept: Tensor
    """bool `[N]`, n of them true: which completion tokens they predict."""


def drafts(model: HeadModel, text: Text, completion_mask: Tensor) -> Iterator[Drafted]:
    """The states that predict completion tokens, for each drafted token in turn; `completion_mask` bool
    `[B, T]`.
    """
    for step, states in enumerate(model.rollout(text)):
        first = step + 2  # the token that step predicts from the very first position
        reached = completion_mask.clone()
        reached[:, :first] = False
        if text.known is not None:
            reached[:, first:] &= text.known[:, : text.known.shape[1] - first]
        yield Drafted(states[:, :-2][reached[:, 2:]], reached[completion_mask])


@torch.no_grad()
def read_text(target: PreTrainedModel, model: HeadModel, input_ids: Tensor) -> tuple[Text, Tensor]:
    """Finished text int64 `[B, T]` (padded on the right) as `model` reads it, and the target's last hidden
    states `[B, T, H]`: one forward pass of the target.
    """
    layers = model.feature_layers
    # No mask: under causal attention no real position looks at the padding behind it.
    out = target.get_decoder()(input_ids=input_ids, use_cache=False, output_hidden_states=bool(layers))
    last = out.last_hidden_state
    features = torch.cat([out.hidden_states[layer] for layer in layers], dim=-1) if layers else last
    return Text(following_embeddings(target, input_ids), features), last


@torch.no_grad()
def cached_text(target: PreTrainedModel, input_ids: Tensor, completion_mask: Tensor, hidden: Tensor) -> Text:
    """The same for a head on the last hidden state, from the states `[N, H]` that sampling kept: known where
    completion tokens are predicted.
    """
    known = torch.zeros_like(completion_mask)
    known[:, :-1] = completion_mask[:, 1:]
    features = hidden.new_zeros(*input_ids.shape, hidden.shape[-1])
    features[known] = hidden
    return Text(following_embeddings(target, input_ids), features, known)


@torch.no_grad()
def text_of_features(
    target: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor, features: Tensor
) -> Text:
    """The same from the features that sampling kept, `[P, F]`, of every position but each text's last."""
    read = torch.zeros_like(attention_mask, dtype=torch.bool)
    read[:, :-1] = attention_mask[:, 1:] > 0
    everywhere = features.new_zeros(*input_ids.shape, features.shape[-1])
    everywhere[read] = features
    return Text(following_embeddings(target, input_ids), everywhere)


def following_embeddings(target: PreTrainedModel, input_ids: Tensor) -> Tensor:
    """The embeddings `[B, T, H]` of the tokens one position later."""
    embeddings: Tensor = target.get_input_embeddings()(input_ids.roll(-1, dims=1)).detach()
    return embeddings


def shifted(states: Tensor) -> Tensor:
    """States `[B, T, H]` one position later; the first is zero."""
    return nn.functional.pad(states, (0, 0, 1, 0))[:, :-1]
