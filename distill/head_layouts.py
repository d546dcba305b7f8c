"""Medusa's and EAGLE-3's public checkpoints, as the servers that speculate with them load them.

Our own drafters use the same names and shapes; what differs is how the draft vocabulary is told:

- Medusa: `blocks.K.layers.J.weight` [H, H], `lm_heads.K.weight` [Vd, H], and with a reduced vocabulary
  `token_map` int64 [Vd], the target id of each row. A shared head is written once per drafted token.
- EAGLE-3: `midlayer.*` (or `layers.0.*`), `fc.weight` [H, 3 H], `norm.weight`, `lm_head.weight` [Vd, H],
  `d2t` int64 [Vd] (row j is target id j + d2t[j]) and `t2d` bool [V]. The embeddings are the target's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from data.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from evaluation.decoder.drafters import DraftModel

_LEFT_OUT = ("embed_tokens.weight", "t2d")  # the target's; and what d2t says already


def to_public(draft: DraftModel) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config and the weights of the public checkpoint of a Medusa or EAGLE drafter."""
    from evaluation.decoder.kinds import kind_of

    config = draft.model.config
    tensors = {name: value.detach().contiguous() for name, value in draft.model.state_dict().items()}
    return _medusa(draft, tensors) if kind_of(config) == "medusa" else _eagle(draft, tensors)


def from_public(weights: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor | None]:
    """Weights under our own names, and the target id int64 [Vd] of each row where they tell it.

    Reads both what `to_public` writes and what `save_drafter` does. Raises `UserError` where the rows of a
    head are not in the order of their ids.
    """
    import torch

    found = {}
    for name, value in weights.items():
        name = name.removeprefix("medusa_heads.")
        if name.startswith("layers.0."):
            name = f"midlayer.{name.removeprefix('layers.0.')}"
        if name not in _LEFT_OUT:
            found[name] = value
    vocab = found.pop("token_map", None)
    if "d2t" in found:
        offsets = found.pop("d2t")
        vocab = torch.arange(len(offsets)) + offsets
    if vocab is not None and not bool((vocab[1:] > vocab[:-1]).all()):
        raise UserError("The checkpoint's draft vocabulary is not in rising order, which is not supported.")
    return found, vocab


def _medusa(draft: DraftModel, tensors: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config = draft.model.config
    for step in range(config.num_heads if config.shared_head else 0):
        tensors[f"lm_heads.{step}.weight"] = draft.model.head(step).weight.detach().clone()
    if draft.vocab is not None:
        tensors["token_map"] = draft.vocab.cpu()
    kept = ("hidden_size", "vocab_size", "truncated_vocab_size", "num_heads", "num_hidden_layers")
    fields = {name: getattr(config, name) for name in kept}
    head = {"model_type": "medusa", "architectures": ["MedusaModel"], "medusa_fc_bias": False}
    return {**head, **fields, "torch_dtype": _dtype(draft)}, tensors


def _eagle(draft: DraftModel, tensors: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    import torch

    config = draft.model.config
    rows, full = len(draft.model.head(0).weight), config.vocab_size
    vocab = torch.arange(rows) if draft.vocab is None else draft.vocab.cpu()
    tensors["d2t"] = vocab - torch.arange(rows)
    tensors["t2d"] = torch.zeros(full, dtype=torch.bool).index_fill_(0, vocab, True)
    family = config.model_type.capitalize()
    head = {"architectures": [f"{family}ForCausalLMEagle3"], "norm_before_residual": False}
    return {**config.to_dict(), **head, "torch_dtype": _dtype(draft)}, tensors


def _dtype(draft: DraftModel) -> str:
    return str(draft.model.dtype).removeprefix("torch.")
