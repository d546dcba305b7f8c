"""A frozen target whose layers are sharded over the processes (FSDP2), so that none holds them all."""

from __future__ import annotations

import os

import torch
from torch.distributed import get_world_size
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel


def shards_weights() -> bool:
    """Does this process train with weights that are sharded over several (fsdp2)?"""
    return os.environ.get("ACCELERATE_USE_FSDP") == "true"


def shard_target(model: PreTrainedModel, device: torch.device) -> None:
    """Give each process its share of every layer's weights, in place; what is not a layer comes whole to
    `device`.

    A forward pass gathers one layer after the other, so all processes have to make it together. Embeddings,
    final norm and head stay whole: losses and acceptance read the head in every step.
    """
    decoder = model.get_decoder()
    names = set(model._no_split_modules or ())
    layers = [module for module in decoder.modules() if type(module).__name__ in names]
    inside = {parameter for layer in layers for parameter in layer.parameters()}
    outside = [parameter for parameter in model.parameters() if parameter not in inside]
    for tensor in (*outside, *model.buffers()):
        tensor.data = tensor.data.to(device)
    mesh = init_device_mesh(device.type, (get_world_size(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    # The root of them, by which the next layer is gathered while one computes
    fully_shard(decoder, mesh=mesh, ignored_params=set(outside))
