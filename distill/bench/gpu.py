"""`distill bench gpu`: the decoder on one card, at the shapes of Llama-3.1-8B and Llama-3.2-1B.

Weights are random, so nothing is downloaded and no answer means anything: speeds depend on shapes alone, and
drafts are accepted at given rates (`evaluation.decoder.synthetic`). transformers knows no such rates: both
decode the same pair greedily, where next to no draft stands, so that a round is what is compared.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from data.errors import UserError
from distill.bench.decoder import Bench, Record, assisted, ours, transformers
from distill.bench.gpu_counts import copy_bandwidth, per_round, step_bytes
from distill.stages import Say
from evaluation.decoder.drafters import DraftModel, ModelDrafter
from evaluation.decoder.engine import Decoder, Request
from evaluation.decoder.runner import Runner
from evaluation.decoder.sampling import SamplingOptions
from evaluation.decoder.synthetic import SyntheticDecoder
from evaluation.speed import measure_costs

LLAMA_3 = {
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}
TARGET = LlamaConfig(
    **LLAMA_3, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32
)
DRAFT = LlamaConfig(
    **LLAMA_3,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    tie_word_embeddings=True,
)
COUNTED_TOKENS = 12  # under the profiler, which keeps every kernel
AIM = 0.7  # of the bandwidth limit, plain decoding at batch 1


@dataclass(frozen=True)
class Plan:
    """What is measured, by default of a big card."""

    target: LlamaConfig = field(default_factory=lambda: TARGET)
    draft: LlamaConfig = field(default_factory=lambda: DRAFT)
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"
    prompt_tokens: int = 128
    new_tokens: int = 128
    num_speculative_tokens: int = 4
    batch_sizes: tuple[int, ...] = (1, 4, 16, 64)
    acceptances: tuple[float, ...] = (0.6, 0.8)
    probe_bytes: int = 1 << 30
    minutes: float = 8.0
    """Parts that would begin after this are left out, and said to be."""


def bench(plan: Plan, say: Say) -> dict[str, Any]:
    """Every part that time and memory allow; UserError where there is no card for it."""
    if plan.device == "cuda" and not torch.cuda.is_available():
        raise UserError("bench gpu measures a CUDA card, and there is none here: run it where there is one.")
    begin = time.perf_counter()
    pair = Pair(plan)
    parts: dict[str, Callable[[], Any]] = {"plain": pair.plain, "round": pair.round}
    parts |= {f"batch_{size}": partial(pair.batch, size) for size in plan.batch_sizes}
    parts |= {
        "transformers_assisted": pair.beside_assisted,
        "transformers_static_compiled": pair.beside_static,
        "plain_compiled": pair.compiled,
    }
    found: dict[str, Any] = {
        "target_parameters": sum(weight.numel() for weight in pair.target.parameters()),
        "draft_parameters": sum(weight.numel() for weight in pair.draft.parameters()),
        "dtype": str(plan.dtype),
        "prompt_tokens": plan.prompt_tokens,
        "new_tokens": plan.new_tokens,
        "num_speculative_tokens": plan.num_speculative_tokens,
    }
    for name, measure in parts.items():
        if time.perf_counter() - begin > 60 * plan.minutes:
            found[name] = {"missing": f"the {plan.minutes:g} minutes were over"}
            continue
        say(f"bench gpu: {name}, {time.perf_counter() - begin:.0f} s in")
        try:
            found[name] = measure()
        except torch.cuda.OutOfMemoryError:
            found[name] = {"missing": "the card's memory is too small for it"}
        gc.collect()
        if plan.device == "cuda":
            torch.cuda.empty_cache()
    return {**found, "seconds": time.perf_counter() - begin}


class Pair:
    """The two models and what is measured of them."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        torch.manual_seed(0)
        self.target, self.draft = random_model(plan.target, plan), random_model(plan.draft, plan)

    def runner(self, batch_size: int) -> Runner:
        plan = self.plan
        return Runner(
            self.target,
            batch_size,
            plan.prompt_tokens + plan.new_tokens + plan.num_speculative_tokens + 1,
        )

    def requests(self, batch_size: int) -> list[Request]:
        """Random prompts that share nothing."""
        plan = self.plan
        ids = torch.randint(
            plan.target.vocab_size,
            (batch_size, plan.prompt_tokens),
            generator=torch.Generator().manual_seed(1),
        )
        return [Request(row, plan.new_tokens, seed) for seed, row in enumerate(ids.tolist())]

    def tokens_per_second(self, decoder: Decoder, batch_size: int) -> float:
        """After the prompts, the faster of two runs that follow one in which graphs are captured."""
        wanted, speeds = self.requests(batch_size), []
        for _ in range(3):
            outputs = decoder.generate(wanted)
            speeds.append(sum(len(each.tokens) - 1 for each in outputs) / decoder.decode_seconds)
        return max(speeds[1:])

    def plain(self) -> dict[str, Any]:
        """Plain decoding of one row against what reading the weights once a token would allow."""
        decoder = Decoder(self.runner(1), eos_ids=(), options=SamplingOptions())
        speed = self.tokens_per_second(decoder, 1)
        bandwidth = copy_bandwidth(self.plan.probe_bytes, self.plan.device)
        read = step_bytes(self.target, self.plan.prompt_tokens + self.plan.new_tokens // 2)
        share = speed * read / bandwidth
        return {
            "tokens_per_second": speed,
            "bytes_per_token": read,
            "copy_bandwidth_gb_per_s": bandwidth / 1e9,
            "limit_tokens_per_second": bandwidth / read,
            "share_of_limit": share,
            "aim": AIM,
            "reached": share >= AIM,
        }

    def round(self) -> dict[str, Any]:
        """What a speculative round at batch 1 asks of the host, and what its forwards cost."""
        plan, runner = self.plan, self.runner(1)
        drafter = ModelDrafter(DraftModel(self.draft), runner, SamplingOptions())
        count = plan.num_speculative_tokens
        decoder = Decoder(
            runner, eos_ids=(), options=SamplingOptions(), drafter=drafter, num_speculative_tokens=count
        )
        counted = per_round(decoder, [replace(self.requests(1)[0], max_new_tokens=COUNTED_TOKENS)])
        costs = measure_costs(runner, drafter, [count], 1)
        return {**counted, "costs": costs, "cost_ratio": costs["cost_ratio"]}

    def batch(self, batch_size: int) -> dict[str, Any]:
        """Speculative over plain decoding, by acceptance."""
        plan, runner = self.plan, self.runner(batch_size)
        plain = self.tokens_per_second(Decoder(runner, eos_ids=(), options=SamplingOptions()), batch_size)
        found: dict[str, Any] = {"plain_tokens_per_second": plain}
        drafter = ModelDrafter(DraftModel(self.draft), runner, SamplingOptions())
        for rate in plan.acceptances:
            decoder = SyntheticDecoder(
                runner,
                eos_ids=(),
                options=SamplingOptions(),
                drafter=drafter,
                num_speculative_tokens=plan.num_speculative_tokens,
                conditional_acceptance=[rate] * plan.num_speculative_tokens,
            )
            speed = self.tokens_per_second(decoder, batch_size)
            account = decoder.account
            found[f"acceptance_{rate:g}"] = {
                "tokens_per_second": speed,
                "speedup": speed / plain,
                "tokens_per_target_call": (account.emitted - account.rows) / account.rounds,
            }
        return found

    def beside_assisted(self) -> dict[str, Any]:
        """transformers' assisted generation of the same pair: the same K, no stopping early."""
        plan, runner = self.plan, self.runner(1)
        drafter = DraftModel(self.draft)
        wanted = self.requests(1)
        shared = Bench(
            self.target, drafter, self.draft, [wanted[0].prompt], plan.new_tokens,
            plan.num_speculative_tokens, seed=0,
        )  # fmt: skip
        model_drafter = ModelDrafter(drafter, runner, SamplingOptions())
        return beside(ours(runner, model_drafter, plan.num_speculative_tokens), assisted(shared), wanted)

    def beside_static(self) -> dict[str, Any]:
        """transformers' `generate` with its static cache, which it compiles where it can."""
        return beside(
            ours(self.runner(1)), transformers(self.target, cache_implementation="static"), self.requests(1)
        )

    def compiled(self) -> dict[str, Any]:
        """Plain decoding with the target's forward fused by torch.compile: does it pay beside graphs?"""
        runner = self.runner(1)
        runner.backbone = torch.compile(runner.backbone, dynamic=False)
        decoder = Decoder(runner, eos_ids=(), options=SamplingOptions())
        try:
            return {"tokens_per_second": self.tokens_per_second(decoder, 1)}
        except Exception as error:  # a compiler may fail in any way; the other parts stand
            return {"missing": f"{type(error).__name__}: {error}"[:300]}


def beside(own: Any, theirs: Any, wanted: list[Request]) -> dict[str, Any]:
    """Seconds per new token of both, prompts included, after a run that warms up; theirs over ours."""
    found: dict[str, Any] = {}
    for name, contender in (("ours", own), ("theirs", theirs)):
        contender(wanted, Record())
        taken = []
        for _ in range(2):
            begin = time.perf_counter()
            made = contender(wanted, Record())
            taken.append((time.perf_counter() - begin) / sum(map(len, made)))
        found[f"{name}_ms_per_token"] = 1e3 * min(taken)
    return {**found, "ratio": found["theirs_ms_per_token"] / found["ours_ms_per_token"]}


def random_model(config: LlamaConfig, plan: Plan) -> PreTrainedModel:
    """A model with random weights, made on the card."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(plan.dtype)
    try:
        with torch.device(plan.device):
            model = LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(default)
    return model.requires_grad_(False)


def report(found: dict[str, Any]) -> str:
    """The findings as the user reads them."""
    lines = []
    for name, value in found.items():
        if not isinstance(value, dict):
            lines.append(f"{name}: {_number(value)}")
            continue
        shown = {key: each for key, each in value.items() if not isinstance(each, dict)}
        lines.append(f"{name}: " + ", ".join(f"{key} {_number(each)}" for key, each in shown.items()))
        lines += [
            f"  {key}: " + ", ".join(f"{inner} {_number(each)}" for inner, each in part.items())
            for key, part in value.items()
            if isinstance(part, dict)
        ]
    return "\n".join(lines)


def _number(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
