"""`distill bench training`: a training step beside those of trl, in one run: tokens per second, peak memory.

Every arm trains the same random drafter of SmolLM2-135M's width against the same random target of its shape,
on the same batch, with forward KL over the completion tokens (`distill.bench.training_arms`). Each runs in a
process of its own, so that one's memory is not another's.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from distill.identity import environment, gpu
from distill.stages import Say

VOCABULARIES = (49_152, 128_256)
ARMS = ("gkd", "trl_chunked", "ours", "ours_hidden")
CURVE_ARMS = ("gkd", "trl_chunked", "ours")
CURVE_TOKENS = (128, 512)
WANTED = {
    "memory_vs_gkd": "at most 0.3",
    "memory_vs_trl_chunked": "at most 1.0",
    "speed_vs_gkd": "at least 1.5",
    "speed_vs_trl_chunked": "at least 1.0",
    "hidden_vs_live": "at least 1.5",
}


@dataclass(frozen=True)
class Shape:
    """The models and the batch. The defaults are SmolLM2-135M's and those of a drafter of 4 layers."""

    vocab_size: int
    hidden_size: int = 576
    intermediate_size: int = 1536
    heads: int = 9
    target_layers: int = 30
    draft_layers: int = 4
    rows: int = 16
    prompt: int = 16
    completion: int = 64
    steps: int = 1
    """Timed, after one on a single row."""


CPU = Shape(0)
CARD = Shape(
    0,
    hidden_size=1024,
    intermediate_size=4096,
    heads=16,
    target_layers=16,
    prompt=64,
    completion=192,
    steps=10,
)
"""Enough work to keep a GPU busy; all of it in under two minutes."""


def bench(say: Say) -> dict[str, Any]:
    """Every arm at every vocabulary, and the losses' own memory over vocabulary and tokens; on the GPU, in a
    shape for one, where there is one."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # else asking for a GPU here spoils the forks
    # Imported once, before processes are forked; nothing is computed here, so no threads are started
    from distill.bench.training_arms import loss_peak, train_steps

    shape = CPU if gpu() is None else CARD

    arms: dict[str, Any] = {}
    for size in VOCABULARIES:
        arms[str(size)] = {}
        for name in ARMS:
            done = arms[str(size)][name] = in_a_process(train_steps, name, replace(shape, vocab_size=size))
            say(f"bench training: {name}, {size:,} ids: {done['tokens_per_second']:.0f} tokens/s")
    curve = []
    for size in VOCABULARIES:
        for tokens in CURVE_TOKENS:
            sized = replace(shape, vocab_size=size)
            peaks = {name: in_a_process(loss_peak, name, sized, tokens) for name in CURVE_ARMS}
            curve.append({"vocabulary": size, "tokens": tokens, **peaks})
        say(f"bench training: memory of the losses over {size:,} ids")
    return {
        "environment": environment(),
        "shape": asdict(shape),
        "arms": arms,
        "ratios": {size: ratios(found) for size, found in arms.items()},
        "curve": curve,
    }


def ratios(arms: dict[str, dict[str, float]]) -> dict[str, float]:
    """Our peak memory and speed over theirs, and the speed with kept states over that with a live target."""

    def of(key: str, ours: str, theirs: str) -> float:
        return arms[ours][key] / arms[theirs][key]

    return {
        "memory_vs_gkd": of("peak_mib", "ours", "gkd"),
        "memory_vs_trl_chunked": of("peak_mib", "ours", "trl_chunked"),
        "speed_vs_gkd": of("tokens_per_second", "ours", "gkd"),
        "speed_vs_trl_chunked": of("tokens_per_second", "ours", "trl_chunked"),
        "hidden_vs_live": of("tokens_per_second", "ours_hidden", "ours"),
    }


def in_a_process(work: Callable[..., Any], *arguments: Any) -> Any:
    """What `work` returns, in a process forked for it. Raises `RuntimeError` where that ends without."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def answer(pipe: Connection) -> None:
        pipe.send(work(*arguments))

    process = context.Process(target=answer, args=(theirs,))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError as error:
        process.join()
        raise RuntimeError(f"an arm of the bench ended early, with exit code {process.exitcode}") from error
    finally:
        process.join()


def report(found: dict[str, Any]) -> str:
    """The findings as the user reads them."""
    shape, machine = found["shape"], found["environment"]
    lines = [
        f"{shape['rows']} rows of {shape['prompt']} + {shape['completion']} tokens, a target of "
        f"{shape['target_layers']} layers and a drafter of {shape['draft_layers']}, width "
        f"{shape['hidden_size']}, {shape['steps']} steps, on {machine['gpu'] or machine['cpu']}, commit "
        f"{machine['commit']}"
    ]
    for size, arms in found["arms"].items():
        lines.append(f"{int(size):,} ids:")
        for name, done in arms.items():
            lines.append(
                f"  {name}: {done['tokens_per_second']:.1f} tokens/s, {done['peak_mib']:.0f} MiB at a step's "
                f"peak, {done['total_mib']:.0f} in all, loss {done['loss']:.5f}"
            )
        for name, value in found["ratios"][size].items():
            lines.append(f"  {name}: {value:.2f} (wanted: {WANTED[name]})")
    lines.append("the loss alone, MiB at its peak:")
    for row in found["curve"]:
        peaks = ", ".join(f"{name} {row[name]:.0f}" for name in CURVE_ARMS)
        lines.append(f"  {row['vocabulary']:,} ids, {row['tokens']} tokens: {peaks}")
    return "\n".join(lines)
