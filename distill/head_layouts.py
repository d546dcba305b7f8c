"""Medusa's and EAGLE-3's public checkpoints, as the servers that speculate with them load them.

Our own drafters use the same names and shapes; what differs is how the draft vocabulary is told:

- Medusa: `blocks.K.layers.J.weight` [H, H], `lm_heads.K.weight` [Vd, H], and with a reduced vocabulary
  `token_map` int64 [Vd], the target id of each row. A shared head is written once per drafted token.
- Medusa as TGI has it: `K.J.linear.weight` and `.bias`, `K.N.weight` [V, H] for a head behind N blocks. It
  knows no token map, so missing rows are filled.
- EAGLE-3: `midlayer.*` (or `layers.0.*`), `fc.weight` [H, 3 H], `norm.weight`, `lm_head.weight` [Vd, H], and
  with a reduced vocabulary `d2t` int64 [Vd] (row j is target id j + d2t[j]) and `t2d` bool [V]. The
  embeddings are the target's.
- speculators: the same weights under `layers.0.*`, and a config that names the verifier and the tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from data.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from evaluation.decoder.drafters import DraftModel

SPECULATORS_VERSION = "0.9.0"
SPECULATORS_LAYERS = ("llama", "qwen3")
"""Model types of a layer that speculators' EAGLE-3 and vLLM's reader of it know."""
_LEFT_OUT = ("embed_tokens.weight", "t2d")  # the target's; and what d2t says already


def to_public(draft: DraftModel) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config and the weights of the public checkpoint of a Medusa or EAGLE drafter."""
    from evaluation.decoder.kinds import kind_of

    config = draft.model.config
    tensors = {name: value.detach().contiguous() for name, value in draft.model.state_dict().items()}
    return _medusa(draft, tensors) if kind_of(config) == "medusa" else _eagle(draft, tensors)


def to_speculators(
    draft: DraftModel, verifier: str, architectures: list[str], num_speculative_tokens: int
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config and the weights of an EAGLE drafter as the library speculators writes them.

    `verifier` is the hub id or directory of the target, `architectures` its config's. `UserError` for a
    layer of another architecture than the library knows.
    """
    from evaluation.decoder.eagle import LAYERS

    config, tensors = to_public(draft)
    if config["model_type"] not in SPECULATORS_LAYERS:
        raise UserError(
            f"speculators knows EAGLE-3 layers of {' and '.join(SPECULATORS_LAYERS)} alone, and this one is "
            f"of {config['model_type']}: export it with --format eagle."
        )
    tensors = {name.replace("midlayer.", "layers.0."): value for name, value in tensors.items()}
    own = ("draft_vocab_size", "norm_before_residual", "target_hidden_size", LAYERS)
    outside = (*own, "architectures", "rollout_steps", "torch_dtype")
    proposal = {"proposal_type": "greedy", "speculative_tokens": num_speculative_tokens}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        **{key: config[key] for key in own},
        "torch_dtype": config["torch_dtype"],
        "transformer_layer_config": {key: value for key, value in config.items() if key not in outside},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{**proposal, "verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "verifier": {"name_or_path": verifier, "architectures": architectures},
        },
    }, tensors


def to_tgi(draft: DraftModel, base: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config and the weights of Medusa heads as text-generation-inference loads them: with biases, which
    are zero, and a head over the full vocabulary for each drafted token. `base` names the target.

    A row that a reduced head lacks is the mean of two others, so its logit never exceeds both of theirs.
    """
    import torch

    config, tensors = draft.model.config, {}
    for number, block in enumerate(draft.model.blocks):
        for layer, linear in enumerate(block.layers):
            tensors[f"{number}.{layer}.linear.weight"] = linear.weight.detach().clone()
            tensors[f"{number}.{layer}.linear.bias"] = torch.zeros(
                len(linear.weight), dtype=draft.model.dtype
            )
        head = draft.model.head(number).weight.detach()
        if draft.vocab is not None:
            filled = head[:2].float().mean(dim=0).to(head.dtype).repeat(config.vocab_size, 1)
            head = filled.index_copy_(0, draft.vocab.cpu(), head)
        tensors[f"{number}.{config.num_hidden_layers}.weight"] = head.clone()
    return {
        "base_model_name_or_path": base,
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_hidden_layers,
    }, tensors


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
    if draft.vocab is not None:  # vLLM has no place for them where the vocabulary is full
        vocab = draft.vocab.cpu()
        tensors["d2t"] = vocab - torch.arange(rows)
        tensors["t2d"] = torch.zeros(full, dtype=torch.bool).index_fill_(0, vocab, True)
    family = config.model_type.capitalize()
    head = {"architectures": [f"{family}ForCausalLMEagle3"], "norm_before_residual": False}
    return {**config.to_dict(), **head, "torch_dtype": _dtype(draft)}, tensors


def _dtype(draft: DraftModel) -> str:
    return str(draft.model.dtype).removeprefix("torch.")
