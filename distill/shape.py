"""The shape of a drafter that is cut out of a model: which layers it keeps, and how wide it is.

Depth costs latency, width hardly does (Yan et al. 2024, arXiv 2402.01528), so layers are what is dropped
first. What a layer, a dimension or a neuron is worth is measured on a few of the target's own texts.

Shape legend: L layers; H width of the residual stream; I neurons of a feed-forward layer; W, J the narrower
ones.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from data.errors import UserError
from distill.models import empty_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Activity:
    """What the parts of a model do, averaged over the tokens of a few texts; float64, on the CPU."""

    change_L: Tensor
    """1 - cos(input, output) of each layer: "block influence", Men et al. 2024, arXiv 2403.03853."""
    stream_LH: Tensor
    """Mean square of each dimension of the residual stream before each layer."""
    neurons_LI: Tensor
    """Mean magnitude of each feed-forward neuron."""


@torch.no_grad()
def measure_activity(model: PreTrainedModel, texts: Sequence[Sequence[int]]) -> Activity:
    """Run the texts (token ids, each once and alone) through a model that is laid out like Llama."""
    layers: Any = model.model.layers
    change, stream, neurons = ([[] for _ in layers] for _ in range(3))  # type: ignore[var-annotated]

    def on_layer(index: int) -> Callable[..., None]:
        def hook(_: Any, inputs: tuple[Tensor, ...], output: Any) -> None:
            before = inputs[0][0].double()
            after = (output[0] if isinstance(output, tuple) else output)[0].double()
            change[index].append(1 - torch.cosine_similarity(before, after, dim=-1))
            stream[index].append(before.square())

        return hook

    def on_neurons(index: int) -> Callable[..., None]:
        def hook(_: Any, inputs: tuple[Tensor, ...]) -> None:
            neurons[index].append(inputs[0][0].double().abs())

        return hook

    handles = [layer.register_forward_hook(on_layer(index)) for index, layer in enumerate(layers)]
    handles += [
        layer.mlp.down_proj.register_forward_pre_hook(on_neurons(index)) for index, layer in enumerate(layers)
    ]
    try:
        for text in texts:
            model.get_decoder()(input_ids=torch.tensor([list(text)], device=model.device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return Activity(*(_means(parts) for parts in (change, stream, neurons)))


def _means(parts: list[list[Tensor]]) -> Tensor:
    return torch.stack([torch.cat(part).mean(0).cpu() for part in parts])


def even_layers(depth: int, count: int) -> list[int]:
    """`count` of `depth` layers, evenly spaced, the first and the last among them."""
    assert 1 <= count <= depth
    return [round(number * (depth - 1) / max(1, count - 1)) for number in range(count)]


def important_layers(change_L: Tensor, count: int) -> list[int]:
    """The `count` layers that change the residual stream most, in their order."""
    return sorted(torch.topk(change_L, count).indices.tolist())


def narrow_config(source: Any, width: int) -> Any:
    """The config of `source` with another hidden size, as many heads, and neurons in proportion. Raises
    `UserError` where the width does not fit."""
    config = copy.deepcopy(source)
    full, heads = config.hidden_size, config.num_attention_heads
    if not 0 < width < full or width % heads:
        raise UserError(
            f"draft.init.width is {width}: give a multiple of the {heads} attention heads below the source's "
            f"{full}, or leave it out."
        )
    config.head_dim = getattr(config, "head_dim", None) or full // heads
    config.intermediate_size = round(config.intermediate_size * width / full)
    config.hidden_size = width
    return config


def narrow(model: PreTrainedModel, width: int, activity: Activity, layers: Sequence[int]) -> PreTrainedModel:
    """A narrower copy by sub-cloning (Samragh et al. 2023, arXiv 2312.09299): the `width` most active
    dimensions of the residual stream, and in each layer as large a share of its most active neurons.

    Attention keeps its heads. A norm divides by the root mean square of fewer, more active dimensions, so its
    weights are raised by what that root gains.

    Args: `model` holds the layers `layers` of the model that `activity` was measured on. Raises `UserError`
    where the width does not fit.
    """
    config = narrow_config(model.config, width)
    stream_H = activity.stream_LH[list(layers)].mean(0)
    dims_W = torch.topk(stream_H, width).indices.sort().values
    gain = float((stream_H[dims_W].mean() / stream_H.mean()).sqrt())
    neurons = config.intermediate_size
    kept = [torch.topk(activity.neurons_LI[layer], neurons).indices.sort().values for layer in layers]
    result = empty_model(config, head_rows=model.get_output_embeddings().weight.shape[0])
    weights = {}
    for name, value in model.state_dict().items():
        index = int(name.split(".")[2]) if name.startswith("model.layers.") else 0
        weights[name] = _slice(name, value, dims_W.to(value.device), kept[index].to(value.device), gain)
    result.load_state_dict(weights)
    return result


def _slice(name: str, value: Tensor, dims_W: Tensor, neurons_J: Tensor, gain: float) -> Tensor:
    """The part of one parameter that a narrower model keeps."""
    module, kind = name.split(".")[-2:]
    if module in ("q_norm", "k_norm"):
        return value
    if module.endswith("norm"):
        return value[dims_W] * gain
    if module in ("embed_tokens", "lm_head"):
        return value[:, dims_W]
    if module in ("q_proj", "k_proj", "v_proj"):
        return value[:, dims_W] if kind == "weight" else value
    if module == "o_proj":
        return value[dims_W]
    if module in ("gate_proj", "up_proj"):
        return value[neurons_J][:, dims_W] if kind == "weight" else value[neurons_J]
    if module == "down_proj":
        return value[dims_W][:, neurons_J] if kind == "weight" else value[dims_W]
    raise UserError(
        f"draft.init.width: the source has a part {name} that cannot be cut narrower; leave it out."
    )
