"""EAGLE-3: one decoder layer that drafts from the target's own features, token by token.

Entry i of the drafter stands for the target's features at position i with the embedding of the token at
i + 1, and gives the token at i + 2: features of a low, a middle and a high layer are fused into one vector g
by `fc`; the layer's attention reads [norm(embedding), norm(g)] and adds to g. Behind the last position that
the target has seen, the drafter's own output stands in for g (Li et al. 2025, arXiv 2503.01840).

Shapes: B rows or samples, T positions, H hidden size, Vd rows of the head, F = 3 H.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from evaluation.decoder.drafters import DraftState, ModelDrafter
from evaluation.decoder.heads import HeadModel, Text, shifted
from evaluation.decoder.runner import PREFILL_CHUNK, Branches, Runner

LAYERS = "eagle_aux_hidden_state_layer_ids"
"""The config field of public checkpoints that names the target's layers; a config with it is an EAGLE's."""
ROLLOUT_STEPS = 7  # of a checkpoint that does not say how far it was trained: EAGLE-3's own
TIMED_WIDTH = 3  # entries of a typical first step: one more than a round's accepted drafts


def feature_layers(depth: int) -> list[int]:
    """A low, a middle and a high layer of a target with `depth` layers, by their number: what enters them is
    taken. EAGLE-3's own choice, where the target is deep enough for it.
    """
    return [2, depth // 2, depth - 3] if depth >= 8 else [min(1, depth - 1), depth // 2, depth - 1]


class EagleLayer(nn.Module):
    """A decoder layer of the target's architecture whose attention reads two vectors side by side."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.input_layernorm = layer.input_layernorm
        self.hidden_norm = copy.deepcopy(layer.input_layernorm)
        self.self_attn: Any = layer.self_attn
        self.post_attention_layernorm = layer.post_attention_layernorm
        self.mlp = layer.mlp
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(self.self_attn, name)
            bias = old.bias is not None
            setattr(self.self_attn, name, nn.Linear(2 * old.in_features, old.out_features, bias=bias))
        # Renamed in transformers 5.24.
        takes = inspect.signature(self.self_attn.forward).parameters
        self.cache_name = "cache" if "cache" in takes else "past_key_values"

    def forward(self, embeddings: Tensor, hidden: Tensor, cache: Any, **settings: Any) -> Tensor:
        both = torch.cat((self.input_layernorm(embeddings), self.hidden_norm(hidden)), dim=-1)
        hidden = hidden + self.self_attn(both, **{self.cache_name: cache}, **settings)[0]
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class EagleModel(HeadModel):
    """The layer, what fuses features, norm and head; the names of the weights are those of public
    checkpoints.

    The config is one of the target's class, with a layer, `draft_vocab_size` and the field LAYERS.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        skeleton = _skeleton(config)
        layer = skeleton.model.layers[0]
        for module in layer.modules():  # one config, so that its kind of attention can be set in one place
            if hasattr(module, "config"):
                module.config = config
        theirs = getattr(config, "target_hidden_size", None) or config.hidden_size
        self.fc = nn.Linear(3 * theirs, config.hidden_size, bias=False)
        self.midlayer = EagleLayer(layer)
        self.norm = skeleton.model.norm
        self.rotary_emb = skeleton.model.rotary_emb
        rows = getattr(config, "draft_vocab_size", None) or config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, rows, bias=False)
        self.post_init()

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return tuple(getattr(self.config, LAYERS))

    def head(self, step: int) -> nn.Linear:
        return self.lm_head

    def forward(
        self,
        embeddings: Tensor,
        hidden: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        cache: Any,
        use_cache: bool = True,
    ) -> BaseModelOutput:
        """`extend` as a runner calls it."""
        out = self.extend(embeddings, hidden, attention_mask, position_ids, cache)
        return BaseModelOutput(last_hidden_state=out)

    def extend(
        self, embeddings: Tensor, hidden: Tensor, attention_mask: Tensor, position_ids: Tensor, cache: Any
    ) -> Tensor:
        """The layer's output `[B, T, H]`, before the norm, for `embeddings` and fused features or own output
        `hidden`, `[B, T, H]` both.
        """
        out: Tensor = self.midlayer(
            embeddings,
            hidden,
            cache,
            attention_mask=attention_mask,
            position_embeddings=self.rotary_emb(hidden, position_ids=position_ids),
            position_ids=position_ids,
        )
        return out

    def rollout(self, text: Text) -> Iterator[Tensor]:
        """As in decoding ("training-time test"): entry i of step k reads, besides what the target had
        computed up to i - k, the entries of the steps before it on its own chain.
        """
        dtype = self.fc.weight.dtype
        embeddings, hidden = text.embeddings.to(dtype), self.fc(text.features.to(dtype))
        width = hidden.shape[1]
        positions = torch.arange(width, device=hidden.device)
        ahead = positions[:, None] - positions  # [T, T]: how far a query stands behind a key
        cache = DynamicCache()
        for step in range(getattr(self.config, "rollout_steps", ROLLOUT_STEPS)):
            masks = [ahead >= step, *(ahead == step - before for before in range(1, step + 1))]
            mask = torch.cat(masks, dim=1)[None, None]
            hidden = self.extend(embeddings, hidden, mask, positions[None], cache)
            yield self.norm(hidden)
            hidden = shifted(hidden)


@torch.no_grad()
def start_eagle(target: PreTrainedModel, vocab: Tensor | None, rollout_steps: int) -> EagleModel:
    """The drafter that training starts from: the target's last layer, norm and head (rows of `vocab`, int64
    `[Vd]`), reading the high features as that layer reads its input; embeddings and the other features join
    with zero weights.
    """
    head = target.get_output_embeddings().weight
    config = copy.deepcopy(target.config)
    depth, width = config.num_hidden_layers, config.hidden_size
    for key, value in list(vars(config).items()):
        if "layer" in key and isinstance(value, list) and len(value) == depth:  # layer_types and its like
            setattr(config, key, value[-1:])
    config.num_hidden_layers, config.tie_word_embeddings = 1, False
    config.target_hidden_size = width
    config.draft_vocab_size = len(head if vocab is None else vocab)
    config.rollout_steps = rollout_steps
    setattr(config, LAYERS, feature_layers(depth))
    model = EagleModel(config)
    layer: Any = target.model.layers[-1]
    source = layer.state_dict()
    own = model.midlayer.state_dict()
    for name, value in source.items():
        if own[name].shape != value.shape:  # the projections that read two vectors
            value = torch.cat((torch.zeros_like(value), value), dim=1)
        own[name].copy_(value)
    model.midlayer.hidden_norm.load_state_dict(layer.input_layernorm.state_dict())
    model.norm.load_state_dict(target.get_decoder().norm.state_dict())
    model.fc.weight.zero_()[:, -width:].fill_diagonal_(1)
    model.lm_head.weight.copy_(head if vocab is None else head[vocab])
    return model


def _skeleton(config: PreTrainedConfig) -> PreTrainedModel:
    """A causal LM of the target's architecture with one layer and next to no embeddings."""
    small = copy.deepcopy(config)
    small.vocab_size, small.num_hidden_layers, small.pad_token_id = 1, 1, None
    # The dtype is not the config's: whoever made this module sets it on all of its weights.
    return AutoModelForCausalLM.from_config(small, dtype=torch.get_default_dtype())


class EagleRunner(Runner):
    """The layer with its ragged cache: token ids stand one position later than their entries."""

    def __init__(self, model: Any, target: Runner, rows: int, length: int, **settings: Any) -> None:
        super().__init__(model, rows, length, **settings)
        self.embed = target.model.get_input_embeddings()
        self.hidden = torch.empty(0)

    def inputs(self, ids: Tensor) -> dict[str, Tensor]:
        return {"embeddings": self.embed(ids).to(self.dtype), "hidden": self.hidden}

    @torch.inference_mode()
    def extend(
        self, ids: Tensor, hidden: Tensor, start: Tensor, rows: slice, tree: Branches | None = None
    ) -> Tensor:
        """Outputs `[B, T, H]` of entries from `start [B]` on, for the tokens behind them int64 `[B, T]` and
        `hidden [B, T, H]`; of a `tree` whose root's entry is at `start`.
        """
        self.hidden = hidden
        return self.forward(ids, start, rows, tree)

    @torch.inference_mode()
    def fuse(self, features: Tensor) -> Tensor:
        """`[..., F]` of the target as `[..., H]`."""
        fused: Tensor = self.model.fc(features.to(self.dtype))
        return fused

    @torch.inference_mode()
    def predict(self, hidden: Tensor) -> Tensor:
        """Logits `[..., Vd]` of outputs `[..., H]`, in float32."""
        return self.logits(self.model.norm(hidden))


class EagleDrafter(ModelDrafter):
    """Drafts with an EAGLE layer. Below `known[b]` the entries come from the target's features; those that a
    draft wrote behind them are written anew when the target has seen their positions.
    """

    capturable = False  # how wide its first step is depends on what was accepted
    runner: EagleRunner

    def make_runner(self, model: Any, rows: int, *, optimize: bool, int8: bool) -> EagleRunner:
        self.target.tap(model.feature_layers)
        return EagleRunner(model, self.target, rows, self.context, optimize=optimize, int8=int8)

    def settle(self, position: Tensor, chained: int) -> None:
        """The first step has read everything that the target has seen, and no draft counts."""
        self.known[: len(position)] = position

    def catch_up(self, state: DraftState) -> None:
        """Read a row's prompt, and what it missed when drafting was paused, up to what a first step reads."""
        if not self.lagging:
            return
        batch = len(state.position)
        for row, (first, end) in enumerate(
            zip(self.known[:batch].tolist(), state.position.tolist(), strict=True)
        ):
            if first < end - 1 and end <= self.context:
                self.read(state.tokens[row, first + 1 : end], row, first)
                self.known[row] = end - 1
        self.lagging = False

    def read(self, ids: Tensor, row: int, first: int) -> None:
        """Entries from `first` on of one row, for the tokens behind them int64 `[n]`, in pieces."""
        rows = slice(row, row + 1)
        for piece in ids.split(PREFILL_CHUNK):
            features = self.target.features[rows, first : first + len(piece)]
            start = torch.tensor([first], device=self.runner.device)
            self.runner.extend(piece[None], self.runner.fuse(features), start, rows)
            first += len(piece)

    def first(self, state: DraftState) -> Tensor:
        """Reads the features of the tokens that the last round emitted, as many as the row with the most."""
        batch = len(state.position)
        entries, last = self.unread(state.position, 1)
        features = self.target.features[:batch].gather(
            1, entries[..., None].expand(-1, -1, self.target.features.shape[-1])
        )
        ids = state.tokens.gather(1, entries + 1)
        hidden = self.runner.extend(ids, self.runner.fuse(features), entries[:, 0], slice(0, batch))
        return self.hear(hidden[torch.arange(batch, device=last.device), last])

    def first_behind_tree(self, state: DraftState) -> Tensor:
        return self.first(state)

    def next(self, token: Tensor, step: int, state: DraftState) -> Tensor:
        start = (state.position + step - 1).clamp(max=self.context - 1)
        rows = slice(0, len(token))
        return self.hear(self.runner.extend(token[:, None], self.hidden[:, None], start, rows)[:, 0])

    def branch(self, tokens: Tensor, parents: Tensor, tree: Branches, state: DraftState) -> Tensor:
        start = (state.position - 1).clamp(max=self.runner.length - tree.places.shape[1])
        before = self.hidden if self.hidden.dim() == 3 else self.hidden[:, None]
        before = before.take_along_dim(parents[..., None], dim=1)
        return self.hear(self.runner.extend(tokens, before, start, slice(0, len(tokens)), tree))

    def hear(self, hidden: Tensor) -> Tensor:
        """Keep the outputs `[..., H]` for the next step; their logits `[..., Vd]`."""
        self.hidden = hidden
        return self.runner.predict(hidden)

    def timed_reading(self, length: int) -> Callable[[], Any]:
        ids = torch.full((min(length, self.context),), 5, device=self.runner.device)
        return lambda: self.read(ids, 0, 0)

    def timed_steps(self, batch_size: int, position: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
        runner, rows = self.runner, slice(0, batch_size)
        width = runner.model.fc.weight.shape[1]
        features = torch.ones(batch_size, TIMED_WIDTH, width, dtype=runner.dtype, device=runner.device)
        ids = torch.full((batch_size, TIMED_WIDTH), 5, device=runner.device)
        at = torch.full((batch_size,), min(position, self.context - TIMED_WIDTH), device=runner.device)

        def first() -> Any:
            hidden = runner.extend(ids, runner.fuse(features), at, rows)
            return self.hear(hidden[:, -1]).argmax(dim=-1)

        def following() -> Any:
            hidden = runner.extend(ids[:, :1], self.hidden[:, None], at, rows)
            return self.hear(hidden[:, 0]).argmax(dim=-1)

        return first, following
