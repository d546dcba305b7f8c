"""Our decoder beside llama.cpp's server on the same float32 weights and the same processor."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from distill.bench.decoder import GREEDY, Bench, Contender, Record, ours, take_turns
from distill.export.gguf import convert, require_converter
from distill.export.hf import build_hf
from distill.export.llama_cpp import Server, complete, require_server, serving
from evaluation.decoder.drafters import ModelDrafter
from evaluation.decoder.engine import Request


def beside_llama_cpp(
    bench: Bench, drafter_dir: Path, target_dir: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """Plain and speculative decoding of both, one prompt at a time, by the answers' seconds per token; here
    ours stop at an end of sequence too, so that both draft for the same text.
    """
    require_server()
    require_converter()
    count = bench.num_speculative_tokens
    with tempfile.TemporaryDirectory(prefix="distill-bench-") as scratch, ExitStack() as servers:
        folder = Path(scratch) / "drafter"
        folder.mkdir()
        build_hf(drafter_dir, target_dir, folder, {"num_speculative_tokens": count}, bench.prompts)
        files = {name: Path(scratch) / f"{name}.gguf" for name in ("target", "draft")}
        convert(target_dir, files["target"], "f32")
        convert(folder, files["draft"], "f32")
        plain = servers.enter_context(serving(files["target"]))
        speculative = servers.enter_context(serving(files["target"], files["draft"], count))
        runner = bench.runner(1)
        drafter = ModelDrafter(bench.drafter, runner, GREEDY, int8=True)
        records = take_turns(
            {
                "plain": ours(runner, eos_ids=bench.eos_ids),
                "speculative": ours(runner, drafter, count, eos_ids=bench.eos_ids),
                "llama_cpp": llama_cpp(plain),
                "llama_cpp_speculative": llama_cpp(speculative),
            },
            bench.groups(1),
            say,
        )
    per_token = {name: seconds_per_token(record) for name, record in records.items()}
    return {
        "tokens_per_second": {name: len(values) / sum(values) for name, values in per_token.items()},
        "plain_vs_llama_cpp": bench.ratio(per_token["llama_cpp"], per_token["plain"]),
        "speculative_vs_llama_cpp": bench.ratio(per_token["llama_cpp_speculative"], per_token["speculative"]),
        "acceptance_rate": {
            name: sum(accepted for _, accepted in records[name].rounds)
            / max(1, sum(proposed for proposed, _ in records[name].rounds))
            for name in ("speculative", "llama_cpp_speculative")
        },
        "answers_equal_to_plain": {
            name: sum(a == b for a, b in zip(record.tokens, records["plain"].tokens, strict=True))
            for name, record in records.items()
        },
        "threads": torch.get_num_threads(),
    }


def llama_cpp(server: Server) -> Contender:
    """A llama.cpp server, stopped while it is not asked; its drafts of an answer count as one round."""

    def decode(group: Sequence[Request], record: Record) -> list[list[int]]:
        (request,) = group
        with server.awake():
            made = complete(server.url, request.prompt, request.max_new_tokens)
        record.decode_seconds.append(made.seconds)
        record.rounds.append((made.drafted, made.accepted))
        return [made.tokens]

    return decode


def seconds_per_token(record: Record) -> list[float]:
    """Seconds of decoding per token after the first, by prompt."""
    return [
        seconds / max(1, len(tokens) - 1)
        for seconds, (tokens,) in zip(record.decode_seconds, record.tokens, strict=True)
    ]
