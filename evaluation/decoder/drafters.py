"""Drafters: who proposes the next K tokens. One protocol, several kinds.

Shapes: B active rows, K drafted tokens, V target vocabulary, Vd rows of a reduced draft head, H target hidden
size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import PreTrainedModel

from evaluation.decoder.runner import Runner
from evaluation.decoder.sampling import SamplingOptions, draw, probabilities


@dataclass
class DraftModel:
    """A drafter that is a causal LM of its own, and the target ids that its head covers."""

    model: PreTrainedModel
    vocab: torch.Tensor | None = None
    """int64 `[Vd]`, ascending target ids: row j of the head is target id `vocab[j]`. None: the full
    vocabulary.
    """


@dataclass
class DraftState:
    """What a drafter may look at when a round begins."""

    tokens: torch.Tensor
    """int64 `[B, S]`: prompt and emitted tokens; the last of row b stands at `position[b]`, what follows is
    stale.
    """
    position: torch.Tensor
    """int64 `[B]`: position of the last emitted token, which no model has seen yet."""
    features: torch.Tensor
    """`[B, H]`: the target's last hidden state of the position before, which predicted the last emitted
    token.
    """
    uniforms: torch.Tensor
    """float64 `[B, K]`: a uniform number per draft."""


@dataclass
class Draft:
    """Proposed tokens."""

    ids: torch.Tensor
    """int64 `[B, K]`, of which row b proposes the first `proposed[b]`."""
    proposed: torch.Tensor
    """int64 `[B]`."""
    probs: torch.Tensor | None
    """`[B, K, V]`, exactly what each token was drawn from; None where tokens were chosen, not drawn
    (one-hot).
    """


class Drafter(Protocol):
    """Proposes tokens for rows 0..B-1, which the engine keeps contiguous."""

    def start(self, row: int, prompt: torch.Tensor) -> None:
        """Row `row` begins anew with prompt int64 `[n]`."""

    def move(self, source: int, destination: int) -> None:
        """Row `source` continues as row `destination`."""

    def draft(self, state: DraftState, count: int) -> Draft:
        """Propose up to `count` tokens for each row of `state`."""


class ModelDrafter:
    """A small causal LM, or the target itself as the health check that accepts everything."""

    def __init__(
        self,
        draft: DraftModel,
        target: Runner,
        options: SamplingOptions,
        *,
        argmax: bool = False,
        stop_below: float = 0.0,
        optimize: bool = True,
        int8: bool = False,
    ) -> None:
        """Rows and positions as the target's; `argmax` drafts greedily also where the target samples;
        `optimize` and `int8` as in `Runner`.

        A row's draft ends early where the drafter's own probability of all that it has proposed falls below
        `stop_below`: what is unlikely to be accepted costs draft steps and a wider verify forward. Whether to
        go on depends on proposed tokens only, never on the next one, so the output stays the target's.
        """
        self.runner = Runner(draft.model, target.cache.num_rows, target.length, optimize=optimize, int8=int8)
        self.vocab = None if draft.vocab is None else draft.vocab.to(self.runner.device)
        self.target_vocab_size = target.vocab_size
        self.options = options
        self.argmax = argmax or options.greedy
        self.stop_below = stop_below

    def start(self, row: int, prompt: torch.Tensor) -> None:
        self.runner.prefill(prompt, row)

    def move(self, source: int, destination: int) -> None:
        self.runner.cache.copy_prefix(source, destination, self.runner.length)

    def draft(self, state: DraftState, count: int) -> Draft:
        batch = state.position.shape[0]
        # The first step is two tokens wide: after a fully accepted round the cache lacks the last drafted
        # token, and feeding it again otherwise writes the same entry. So no round needs an extra forward.
        pair = torch.stack((state.position - 1, state.position), dim=1)
        inputs, start = state.tokens.gather(1, pair), state.position - 1
        ids, probs = [], []
        reach = torch.ones(batch, device=self.runner.device)
        proposed = torch.zeros_like(state.position)
        for step in range(count):
            going = reach >= self.stop_below
            if self.stop_below and not going.any():
                break
            hidden = self.runner.forward(inputs, start, slice(0, batch))[:, -1]
            token, distribution, confidence = self.choose(self.runner.logits(hidden), state.uniforms[:, step])
            ids.append(token)
            probs.append(distribution)
            proposed += going
            reach = torch.where(going, reach * confidence, 0)
            inputs, start = token[:, None], start + inputs.shape[1]
        return Draft(torch.stack(ids, dim=1), proposed, None if self.argmax else torch.stack(probs, dim=1))

    def choose(
        self, logits: torch.Tensor, uniform: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A token id `[B]`, the distribution `[B, V]` over target ids it was drawn from (empty for an
        argmax), and the drafter's probability of it `[B]`.
        """
        if self.argmax:
            confidence, index = logits.softmax(dim=-1).max(dim=-1)
            return index if self.vocab is None else self.vocab[index], logits.new_empty(0), confidence
        probs = probabilities(logits, self.options)
        if self.vocab is not None:
            full = probs.new_zeros(probs.shape[0], self.target_vocab_size)
            probs = full.index_copy_(1, self.vocab, probs)
        token = draw(probs, uniform)
        return token, probs, probs.gather(1, token[:, None])[:, 0]


class NgramDrafter:
    """Prompt look-up: copy what followed the latest earlier occurrence of the last tokens. Untrained, the
    control.

    Looks for the longest match of `longest` down to `shortest` tokens (Saxena 2023, "prompt lookup
    decoding").
    """

    def __init__(self, longest: int = 3, shortest: int = 1) -> None:
        self.longest, self.shortest = longest, shortest

    def start(self, row: int, prompt: torch.Tensor) -> None:
        """Nothing to prepare: the look-up reads the row's tokens."""

    def move(self, source: int, destination: int) -> None:
        """Nothing to move."""

    def draft(self, state: DraftState, count: int) -> Draft:
        batch = state.position.shape[0]
        ids = torch.zeros(batch, count, dtype=torch.int64)
        proposed = torch.zeros(batch, dtype=torch.int64)
        for row, end in enumerate((state.position + 1).tolist()):
            found = self.look_up(state.tokens[row, :end].tolist(), count)
            ids[row, : len(found)] = torch.tensor(found, dtype=torch.int64)
            proposed[row] = len(found)
        width = int(proposed.max())
        device = state.position.device
        return Draft(ids[:, :width].to(device), proposed.to(device), None)

    def look_up(self, tokens: list[int], count: int) -> list[int]:
        """The up to `count` tokens that followed the latest earlier occurrence of the longest matching
        suffix.
        """
        for size in range(min(self.longest, len(tokens) - 1), self.shortest - 1, -1):
            suffix = tokens[-size:]
            for start in range(len(tokens) - size - 1, -1, -1):
                if tokens[start : start + size] == suffix:
                    return tokens[start + size : start + size + count]
        return []
