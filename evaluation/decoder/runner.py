"""One unmodified transformers causal LM with a ragged cache: token ids in, hidden states and logits out.

Shapes: B rows, T new tokens, W cache slots in view, H hidden size, V rows of the head.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from data.errors import UserError
from evaluation.decoder.attention import FOLDED_ATTENTION
from evaluation.decoder.cache import RaggedCache, RaggedLayer
from evaluation.decoder.linear import pack_linears, quantize_linears
from evaluation.head import head_of

WINDOW_STEP = 64  # cache slots in view grow in steps, so that attention does not pay for the empty rest
GPU_WINDOW_STEP = 256  # a captured graph for each
PREFILL_CHUNK = 512  # tokens of a forward that reads prompts: products are fast, and memory is bounded


def check_can_roll_back(model: PreTrainedModel) -> None:
    """Raise UserError when the model's state cannot be rolled back by moving a position, naming model and
    reason.
    """
    config = model.config.get_text_config()
    name = " ".join(filter(None, [type(model).__name__, model.name_or_path]))
    sliding = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    layer_types = set(getattr(config, "layer_types", None) or [sliding])
    reason = None
    if getattr(config, "is_encoder_decoder", False):
        reason = "it is an encoder-decoder model"
    elif getattr(model, "_is_stateful", False) or not hasattr(config, "num_attention_heads"):
        reason = "it keeps a recurrent state, which cannot be rolled back"
    elif layer_types - {"full_attention"}:
        reason = f"its layers of type {', '.join(sorted(layer_types - {'full_attention'}))} are not supported"
    elif getattr(config, "alibi", False):
        reason = "ALiBi position biases are not supported"
    elif (getattr(config, "rope_parameters", None) or {}).get("rope_type") in ("dynamic", "longrope"):
        reason = "its rotary frequencies depend on the longest row of a batch"
    if reason:
        raise UserError(
            f"{name} cannot be decoded speculatively here: {reason}. Choose a full-attention causal LM."
        )


class Branches(Protocol):
    """C columns that form a tree per row, column 0 its root, of which the last T are read now."""

    @property
    def ancestors(self) -> torch.Tensor:
        """bool `[B, T, C]`: whether the i-th column read (dim 1) is column j (dim 2) or follows it, however
        far.
        """

    @property
    def depths(self) -> torch.Tensor:
        """int64 `[B, T]`: positions behind the root."""

    @property
    def places(self) -> torch.Tensor:
        """int64 `[B, C]`: cache slots behind the root's, each of 0 .. C - 1 once."""


class Runner:
    """A causal LM that decodes `batch_size` ragged rows of at most `max_length` positions.

    The model's modules are copied (its parameters are shared), so the caller's model stays as it was.
    `optimize` swaps linear layers on a CPU for packed ones, or with `int8` for ones with 8-bit weights (see
    `linear.py`); `int8` is for drafters only.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        batch_size: int,
        max_length: int,
        *,
        optimize: bool = True,
        int8: bool = False,
    ) -> None:
        check_can_roll_back(model)
        config = model.config.get_text_config()
        limit = getattr(config, "max_position_embeddings", None)
        if limit is not None and max_length > limit:
            raise UserError(
                f"{type(model).__name__} has {limit} positions, but prompt and answer need {max_length}: "
                "lower max_new_tokens or shorten the prompts."
            )
        self.device, self.dtype = model.device, model.dtype
        self.model = share_parameters(model)
        self.model.eval()
        self.hidden_size, self.vocab_size = config.hidden_size, config.vocab_size
        heads = config.num_attention_heads
        self.groups = heads // getattr(config, "num_key_value_heads", heads)
        # Models whose attention does not go through the interface keep their own.
        self.folded = (
            getattr(model, "_supports_attention_backend", False) and config._attn_implementation == "sdpa"
        )
        if self.folded:
            self.model.config._attn_implementation = FOLDED_ATTENTION
        if optimize and self.device.type == "cpu":
            quantize_linears(self.model) if int8 else pack_linears(self.model)
        self.backbone = self.model.base_model
        self.head, self.head_form = self.model.get_output_embeddings(), head_of(model)
        parameters = inspect.signature(self.backbone.forward).parameters
        self.cache_name = (
            "cache" if "cache" in parameters else "past_key_values"
        )  # renamed in transformers 5.24
        self.length = (max_length + WINDOW_STEP - 1) // WINDOW_STEP * WINDOW_STEP
        self.cache = RaggedCache(config.num_hidden_layers, batch_size, self.length)
        self.slots = torch.arange(self.length, device=self.device)
        self.tapped: tuple[int, ...] = ()
        self.entering: dict[int, torch.Tensor] = {}

    @torch.inference_mode()
    def forward(
        self,
        ids: torch.Tensor,
        start: torch.Tensor,
        rows: slice | None = None,
        tree: Branches | None = None,
        window: int | None = None,
    ) -> torch.Tensor:
        """Hidden states `[B, T, H]` after the final norm for token ids `[B, T]` whose first stands at
        position `start [B]`; where they are columns of a `tree`, its root does. `window` slots hold all of
        them and what came before.
        """
        width = ids.shape[1]
        slots = start[:, None] + (self.slots[:width] if tree is None else tree.places[:, -width:])
        # On a CPU the positions are at hand; on a GPU reading them would stop the stream, so all slots stay
        # in view.
        if window is None:
            window = self.window(int(slots.max()) + 1) if self.device.type == "cpu" else self.length
        self.cache.place(slots, rows or slice(0, self.cache.num_rows), window)
        positions = slots if tree is None else start[:, None] + tree.depths
        hidden = self.backbone(
            **self.inputs(ids),
            attention_mask=self.mask(slots, window, start, tree),
            position_ids=positions,
            use_cache=True,
            **{self.cache_name: self.cache},
        ).last_hidden_state
        if self.tapped:
            features = torch.cat([self.entering[layer] for layer in self.tapped], dim=-1)[:, None]
            self.cache.layers[-1].update(features, features[..., :0])
        return hidden

    def window(self, slots: int) -> int:
        """The view that holds so many cache slots: a few sizes serve all."""
        assert slots <= self.length, f"position {slots} is past the cache's {self.length} slots"
        step = WINDOW_STEP if self.device.type == "cpu" else GPU_WINDOW_STEP
        return min(self.length, (slots + step - 1) // step * step)

    def inputs(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """What the model reads of token ids `[B, T]`."""
        return {"input_ids": ids}

    def tap(self, layers: Sequence[int]) -> None:
        """From now on keep what enters these `layers`, for drafters that draw on it: see `features`.

        It stands in the cache as one more layer, so it is copied, moved and overwritten with the rest.
        """
        if self.tapped:
            assert self.tapped == tuple(layers), "drafters on one target runner must tap the same layers"
            return
        self.tapped = tuple(layers)
        self.cache.layers.append(RaggedLayer(self.cache))
        for layer in set(layers):

            def keep(module: Any, args: Any, kwargs: Any, layer: int = layer) -> None:
                self.entering[layer] = args[0] if args else kwargs["hidden_states"]

            self.backbone.layers[layer].register_forward_pre_hook(keep, with_kwargs=True)

    @property
    def features(self) -> torch.Tensor:
        """`[rows, S, F]`: what entered the tapped layers at every position that was read, side by side."""
        kept: torch.Tensor = self.cache.layers[-1].keys
        return kept[:, 0]

    def prefill(self, texts: Sequence[torch.Tensor], row: int, start: Sequence[int]) -> torch.Tensor:
        """Read one text each, int64 `[n]`, into the rows from `row` on, from the positions `start` on; the
        hidden states `[B, H]` of their last tokens.

        Texts that follow each other are read together, the shorter ones padded: order them by length. What is
        read behind a text's end is stale, as after a rollback.
        """
        states = []
        for group in read_together([len(text) for text in texts], start):
            ids = pad_sequence(list(texts[group]), batch_first=True).to(self.device)
            rows = slice(row + group.start, row + group.stop)
            begin = torch.tensor(start[group], device=self.device)
            furthest = max(start[group])
            for chunk in ids.split(PREFILL_CHUNK, dim=1):
                furthest += chunk.shape[1]
                hidden = self.forward(chunk, begin, rows, window=self.window(furthest))
                begin = begin + chunk.shape[1]
            last = [(len(text) - 1) % PREFILL_CHUNK for text in texts[group]]
            states.append(hidden[range(len(last)), last])
        return torch.cat(states)

    def mask(
        self, slots: torch.Tensor, window: int, start: torch.Tensor, tree: Branches | None
    ) -> torch.Tensor:
        """Additive mask `[B, 1, T, W]` (folded: `[B, 1, G * T, W]`): a token sees the slots up to its own, in
        a tree those before the root, its ancestors' and its own.
        """
        hidden = self.slots[:window] > slots[:, None, :, None]
        if tree is not None:
            columns = (start[:, None] + tree.places)[:, None, None].expand(-1, 1, slots.shape[1], -1)
            hidden.scatter_(3, columns, ~tree.ancestors[:, None])
        mask = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device)
        mask.masked_fill_(hidden, torch.finfo(self.dtype).min)
        return mask.repeat(1, 1, self.groups, 1) if self.folded else mask

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Head logits `[..., V]` of hidden states `[..., H]`, in float32."""
        return self.head_form.shaped(self.head(hidden).float())


def read_together(lengths: Sequence[int], starts: Sequence[int]) -> list[slice]:
    """Runs of texts that fit into one forward of `PREFILL_CHUNK` tokens, padding included, which must not
    stand behind the furthest text's end: there may be no position. A longer text is a run by itself.
    """
    furthest = max(start + length for start, length in zip(starts, lengths, strict=True))

    def fits(run: slice) -> bool:
        width = max(lengths[run])
        return len(lengths[run]) * width <= PREFILL_CHUNK and max(starts[run]) + width <= furthest

    runs: list[slice] = []
    first = 0
    for end in range(1, len(lengths) + 1):
        if end == len(lengths) or not fits(slice(first, end + 1)):
            runs.append(slice(first, end))
            first = end
    return runs


def share_parameters(model: PreTrainedModel) -> PreTrainedModel:
    """A structural copy of a model: new modules, the same parameter and buffer tensors."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, memo={id(tensor): tensor for tensor in tensors})
