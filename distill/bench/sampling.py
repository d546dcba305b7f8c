"""`distill bench sampling`: the built-in sampling engine beside transformers' generate on the same prompts,
in one run, and how many greedy answers another batch width changes.

All engines take turns in rotating order, pass by pass. A pass is what the sampling stage does: read all
prompts, answer them to their ends. The built-in engine keeps the hidden states that the recipe wants kept,
which no peer gives.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.engines import Completion, SampleRequest, SamplingEngine
from data.errors import UserError
from distill.bench.sampling_peers import GenerateEngine, ProcessesEngine
from distill.context import Run
from distill.engines import sampling_drafter
from distill.identity import environment
from distill.recipe import Recipe
from distill.stages import Say
from evaluation.decoder.sampler import BuiltinSampler, decoder_requests
from evaluation.lossless import compare_greedy, count_verdicts

if TYPE_CHECKING:
    from evaluation.decoder.drafters import DraftModel

PROMPTS, BATCH, NEW_TOKENS, PASSES = 96, 48, 32, 3
OTHER_BATCH, COMPARED = 12, 24
"""The batch width at which so many greedy answers are decoded again."""
TEMPERATURES = (0.0, 1.0)
BUILTIN = "builtin"
PEERS = ("transformers", "transformers_static_cache", "vllm")
_WARM_UP = 2  # tokens


@dataclass
class Passes:
    """What one engine made and took, pass by pass."""

    seconds: list[float] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    """Of the first pass."""

    @property
    def speeds(self) -> list[float]:
        """Tokens of answers per second, by pass; an engine's passes give the same answers."""
        tokens = sum(map(len, self.answers))
        return [tokens / seconds for seconds in self.seconds]


def bench(recipe: Recipe, runs_dir: Path, say: Say) -> dict[str, Any]:
    """Every engine that can run here, on the recipe's target and its first training prompts.

    Raises `UserError` where there are fewer prompts than one batch.
    """
    from transformers.utils import logging

    logging.set_verbosity_error()
    with ExitStack() as stack:
        run = Run(recipe, runs_dir, say, stack)
        prompts = [ids for prompt, ids in run.prompts if prompt.split == "train"][:PROMPTS]
        if len(prompts) < BATCH:
            raise UserError(f"recipe {recipe.name} has {len(prompts)} training prompts: a batch is {BATCH}")
        requests = [SampleRequest(ids, seed) for seed, ids in enumerate(prompts)]
        engines, missing = make_engines(run, max(map(len, prompts)) + NEW_TOKENS, stack)
        passes = {f"{t:g}": take_turns(engines, requests, t, say) for t in TEMPERATURES}
        greedy = passes["0"]
        builtin = engines[BUILTIN]
        assert isinstance(builtin, BuiltinSampler)
        return {
            "recipe": recipe.name,
            "prompts": len(prompts),
            "batch_size": BATCH,
            "new_tokens": NEW_TOKENS,
            "passes": PASSES,
            "environment": environment(),
            "tokens_per_second": {
                t: {name: spread(each.speeds) for name, each in found.items()} for t, found in passes.items()
            },
            "ratios": {t: ratios(found) for t, found in passes.items()},
            "prefill_share": prefill_share(builtin, requests),
            "missing": missing,
            "other_width": other_width(run, requests[:COMPARED], greedy[BUILTIN].answers),
            "answers_of_generate": verdicts(
                builtin, requests, greedy[BUILTIN].answers, greedy["transformers"].answers
            ),
        }


def make_engines(run: Run, length: int, stack: ExitStack) -> tuple[dict[str, SamplingEngine], dict[str, str]]:
    """Engines by name, and why others are missing."""
    import torch

    target = run.target
    settings: dict[str, Any] = {
        "eos_ids": target.eos_ids,
        "batch_size": BATCH,
        "max_length": length,
        "signal_temperature": run.kept_signal_temperature,
    }
    engines: dict[str, SamplingEngine] = {BUILTIN: BuiltinSampler(target.model, **settings)}
    missing: dict[str, str] = {}
    if (drafter := trained_drafter(run)) is not None:
        from distill.self_acceleration import SpeculativeSampler

        count = run.recipe.sample.num_speculative_tokens
        engines["builtin_with_drafter"] = SpeculativeSampler(
            target.model, drafter, count, **{**settings, "max_length": length + count + 1}
        )
    else:
        missing["builtin_with_drafter"] = f"no drafter is trained here: `distill train {run.recipe.name}`"
    cores = torch.get_num_threads()
    if run.device == "cpu" and cores > 1:
        engines["builtin_in_processes"] = stack.enter_context(
            ProcessesEngine(cores, run.target_folder, run.recipe.target.dtype, settings)
        )
    engines["transformers"] = GenerateEngine(target.model, target.eos_ids, BATCH)
    engines["transformers_static_cache"] = GenerateEngine(
        target.model, target.eos_ids, BATCH, cache_implementation="static", disable_compile=True
    )
    if run.device == "cpu":
        missing["vllm"] = "compared on a GPU alone"
        return engines, missing
    from data.vllm_engine import VllmConfig, VllmEngine

    try:
        engines["vllm"] = VllmEngine(
            run.target_folder,
            run.recipe.target.dtype,
            VllmConfig(gpu_memory_utilization=0.5),  # the same GPU holds the others
            max_length=length,
            eos_ids=target.eos_ids,
        )
    except UserError as error:
        missing["vllm"] = str(error)
    return engines, missing


def trained_drafter(run: Run) -> DraftModel | None:
    """The recipe's drafter to sample with, else the one that it has trained, else none."""
    from distill.models import load_drafter

    if run.sampling_drafter_folder is not None:
        return sampling_drafter(run, run.sampling_drafter_folder)
    trained = run.stages["train"]
    return None if trained.manifest() is None else load_drafter(trained.directory / "drafter", run.device)


def take_turns(
    engines: Mapping[str, SamplingEngine], requests: Sequence[SampleRequest], temperature: float, say: Say
) -> dict[str, Passes]:
    """Every engine over all requests, PASSES times in rotating order, after a warm-up."""
    names = list(engines)
    for name in names:
        answers(engines[name], requests[:BATCH], temperature, _WARM_UP)
    found = {name: Passes() for name in names}
    for number in range(PASSES):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            begin = time.perf_counter()
            made = answers(engines[name], requests, temperature, NEW_TOKENS)
            found[name].seconds.append(time.perf_counter() - begin)
            found[name].answers = found[name].answers or made
        say(f"bench sampling: temperature {temperature:g}, pass {number + 1} of {PASSES}")
    return found


def answers(
    engine: SamplingEngine, requests: Sequence[SampleRequest], temperature: float, new_tokens: int
) -> list[list[int]]:
    """The tokens of every answer."""
    results = engine.sample(
        requests, temperature=temperature, max_new_tokens=new_tokens, on_tokens=lambda count: None
    )
    return [result.tokens if isinstance(result, Completion) else [] for result in results]


def spread(values: Sequence[float]) -> dict[str, float]:
    """The median, and the least and greatest beside it."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def ratios(found: Mapping[str, Passes]) -> dict[str, dict[str, float]]:
    """Speeds over each other, pass by pass: ours over each peer, our variants over the plain one."""
    own = found[BUILTIN].speeds
    pairs = {f"{BUILTIN}_over_{peer}": (own, found[peer].speeds) for peer in PEERS if peer in found}
    for name in found:
        if name.startswith(f"{BUILTIN}_"):
            pairs[f"{name}_over_{BUILTIN}"] = (found[name].speeds, own)
    return {
        name: spread([mine / theirs for mine, theirs in zip(*pair, strict=True)])
        for name, pair in pairs.items()
    }


def prefill_share(engine: BuiltinSampler, requests: Sequence[SampleRequest]) -> float:
    """How much of a greedy pass goes into reading the prompts."""
    decoder = engine.decoder(0.0)
    decoder.generate(decoder_requests(requests, NEW_TOKENS))
    return decoder.prefill_seconds / (decoder.prefill_seconds + decoder.decode_seconds)


def other_width(
    run: Run, requests: Sequence[SampleRequest], known: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Greedy answers decoded again in batches of another width: the same, parted at a near tie, or a bug."""
    length = max(len(request.prompt) for request in requests) + NEW_TOKENS
    engine = BuiltinSampler(
        run.target.model,
        eos_ids=run.target.eos_ids,
        batch_size=OTHER_BATCH,
        max_length=length,
        signal_temperature=None,
    )
    again = answers(engine, requests, 0.0, NEW_TOKENS)
    return {"batch_size": OTHER_BATCH, **verdicts(engine, requests, known, again)}


def verdicts(
    engine: BuiltinSampler,
    requests: Sequence[SampleRequest],
    known: Sequence[Sequence[int]],
    others: Sequence[Sequence[int]],
) -> dict[str, int]:
    """How many of `others` are the `known` greedy answers, part from them at a near tie, or by a bug."""
    asked = decoder_requests(requests, NEW_TOKENS)
    return count_verdicts(
        [
            compare_greedy(engine.target, request, one, other)
            for request, one, other in zip(asked, known, others, strict=False)
        ]
    )


def report(found: Mapping[str, Any]) -> str:
    """The findings as the user reads them."""
    machine = found["environment"]
    lines = [
        f"{found['prompts']} prompts of {found['recipe']}, up to {found['new_tokens']} tokens each, batch "
        f"{found['batch_size']}, {found['passes']} passes, on {machine['cpu']}, commit {machine['commit']}"
    ]
    for temperature, speeds in found["tokens_per_second"].items():
        lines.append(f"temperature {temperature}, tokens/s (median, least and greatest pass):")
        lines += [f"  {name}: {_said(value, 0)}" for name, value in speeds.items()]
        lines += [f"  {name}: {_said(value, 2)}x" for name, value in found["ratios"][temperature].items()]
    lines.append(f"reading prompts takes {found['prefill_share']:.0%} of a greedy pass of {BUILTIN}")
    width = found["other_width"]
    lines.append(f"greedy answers again in batches of {width['batch_size']}: {_verdicts(width)}")
    lines.append(f"greedy answers of transformers' generate: {_verdicts(found['answers_of_generate'])}")
    lines += [f"{name}: not measured, {reason}" for name, reason in found["missing"].items()]
    return "\n".join(lines)


def _said(value: Mapping[str, float], digits: int) -> str:
    return f"{value['median']:.{digits}f} [{value['low']:.{digits}f}, {value['high']:.{digits}f}]"


def _verdicts(counts: Mapping[str, int]) -> str:
    return (
        f"{counts['identical_outputs']} the same, {counts['near_ties']} part at a near tie, "
        f"{counts['bugs']} by a bug"
    )
