"""Cut a drafter out of a model: its embeddings, some of its layers, its final norm and rows of its head."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from data.errors import UserError
from distill.models import empty_model

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from distill.drafter import InitConfig


def cut(
    source: PreTrainedModel, init: InitConfig, head_rows_VH: Tensor, texts: Sequence[Sequence[int]]
) -> PreTrainedModel:
    """The chosen layers of a model, as wide as asked for."""
    from distill.shape import even_layers, important_layers, measure_activity, narrow

    depth, count = depth_of(source), init.layer_count
    if count is not None and count > depth:
        raise UserError(f"draft.init.layer_count is {count}, but the source has {depth} layers.")
    by_importance = count is not None and init.choose_by == "importance"
    activity = measure_activity(source, texts) if by_importance or init.width is not None else None
    if count is None:
        layers = list(range(depth)) if init.layers is None else init.layers
    elif activity is not None and by_importance:
        layers = important_layers(activity.change_L, count)
    else:
        layers = even_layers(depth, count)
    model = prune(source, layers, head_rows_VH)
    return model if activity is None or init.width is None else narrow(model, init.width, activity, layers)


def prune(source: PreTrainedModel, layers: list[int], head_rows_VH: Tensor) -> PreTrainedModel:
    """A new model with copies of the source's embeddings, chosen layers and final norm, and an untied head of
    the rows given. The source is left as it was. Raises `UserError` when a layer does not exist."""
    depth = depth_of(source)
    if not layers or any(not 0 <= layer < depth for layer in layers) or sorted(set(layers)) != layers:
        raise UserError(
            f"draft.init.layers must name layers of the source in rising order, from 0 to {depth - 1}; "
            f"it is {layers}."
        )
    config = pruned_config(source.config, layers)
    model = empty_model(config, head_rows=len(head_rows_VH))
    weights = {}
    for name, value in source.state_dict().items():
        if name.startswith("model.layers."):
            layer, rest = name.removeprefix("model.layers.").split(".", 1)
            if int(layer) in layers:
                weights[f"model.layers.{layers.index(int(layer))}.{rest}"] = value
        elif name != "lm_head.weight":
            weights[name] = value
    model.load_state_dict({**weights, "lm_head.weight": head_rows_VH})
    return model


def pruned_config(source: Any, layers: Sequence[int]) -> Any:
    """The config of a model with these layers of `source` alone, and an untied head."""
    config = copy.deepcopy(source)
    for key, value in list(vars(config).items()):
        if "layer" in key and isinstance(value, list) and len(value) == source.num_hidden_layers:
            setattr(config, key, [value[layer] for layer in layers])  # layer_types and its like
    config.num_hidden_layers = len(layers)
    config.tie_word_embeddings = False
    return config


def check_prunable(model: PreTrainedModel, name: str) -> None:
    """Refuse models that are not laid out like Llama: `model.embed_tokens`, `model.layers`, `model.norm`,
    `lm_head`."""
    import torch

    inner = getattr(model, "model", None)
    like_llama = (
        isinstance(inner, torch.nn.Module)
        and isinstance(getattr(inner, "layers", None), torch.nn.ModuleList)
        and isinstance(getattr(inner, "embed_tokens", None), torch.nn.Embedding)
        and isinstance(getattr(model, "lm_head", None), torch.nn.Linear)
        and {name for name, _ in inner.named_children()} == {"embed_tokens", "layers", "norm", "rotary_emb"}
    )
    if not like_llama:
        raise UserError(
            f"draft.init.from: {name} is a {type(model).__name__}, which is not laid out like Llama "
            "(model.embed_tokens, model.layers, model.norm, lm_head), so no drafter can be built from it."
        )
    if model.lm_head.bias is not None:
        raise UserError(
            f"draft.init.from: the head of {name} has a bias, which a cut head would lose: take another "
            "member of its family whole, without layers, layer_count, width and vocab_size."
        )


def depth_of(model: PreTrainedModel) -> int:
    """How many layers it has."""
    return len(model.model.layers)
