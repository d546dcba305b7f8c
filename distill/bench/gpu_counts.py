"""What a card could do and what it is asked: bandwidth, bytes a step reads, launches and syncs of a round."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel

from evaluation.decoder.engine import Decoder, Request

LAUNCHES = (
    "cudaLaunchKernel",
    "cudaLaunchKernelExC",
    "cuLaunchKernel",
    "cuLaunchKernelEx",
    "cudaGraphLaunch",
)
SYNCS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "aten::_local_scalar_dense", "aten::equal")
WAITS = ("cudaEventSynchronize",)


def copy_bandwidth(size: int, device: str) -> float:
    """Bytes/s that a copy of `size` bytes moves, read and written, the best of ten."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    taken = []
    for _ in range(10):
        _synchronize(device)
        begin = time.perf_counter()
        copy.copy_(source)
        _synchronize(device)
        taken.append(time.perf_counter() - begin)
    return 2 * size / min(taken)


def step_bytes(model: PreTrainedModel, position: int) -> int:
    """Bytes that a step of one row at `position` has to read: all weights but the table of embeddings, of
    which it reads a row (a tied head is that table), and the keys and values so far.
    """
    config = model.config
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    table = 0 if tied else model.get_input_embeddings().weight.numel()
    weights = sum(weight.numel() for weight in model.parameters()) - table
    head_size = config.hidden_size // config.num_attention_heads
    cached = 2 * position * config.num_hidden_layers * config.num_key_value_heads * head_size
    size: int = (weights + cached) * model.dtype.itemsize
    return size


def per_round(decoder: Decoder, requests: Sequence[Request]) -> dict[str, Any]:
    """Launches, kernels and host syncs per round of a generation whose graphs are captured already, prompts
    included in neither: those of a generation of one token are taken off.

    `waits` are those for the tokens of the round before. On a CPU, launches are operators.
    """
    decoder.generate(requests)
    short = [Request(request.prompt, 1, request.seed) for request in requests]
    decoder.generate(short)
    whole, prompts = _counts(decoder, requests), _counts(decoder, short)
    rounds = max(1, decoder_rounds(decoder, requests))
    return {
        "rounds": rounds,
        **{name: (whole[name] - prompts[name]) / rounds for name in whole},
    }


def decoder_rounds(decoder: Decoder, requests: Sequence[Request]) -> int:
    """Rounds of the longest row."""
    return max(len(output.rounds) for output in decoder.generate(requests))


def _counts(decoder: Decoder, requests: Sequence[Request]) -> dict[str, int]:
    cuda = decoder.runner.device.type == "cuda"
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if cuda else [])
    with profile(activities=activities) as seen:
        decoder.generate(requests)
        _synchronize(decoder.runner.device.type)
    names = [event.name for event in seen.events() or []]
    on_card = sum(event.device_type == torch.autograd.DeviceType.CUDA for event in seen.events() or [])
    return {
        "launches": sum(name in LAUNCHES if cuda else name.startswith("aten::") for name in names),
        "kernels": on_card,
        "syncs": sum(name in SYNCS for name in names),
        "waits": sum(name in WAITS for name in names),
    }


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
