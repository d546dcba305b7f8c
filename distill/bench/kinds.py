"""`distill bench kinds`: drafters of several kinds for one target, trained on the same samples, in one race.

Each recipe's trained drafter, n-gram look-up and plain decoding take turns on the same test prompts, batch
size by batch size, over one target runner; costs are measured in the same run. Each drafter races with
a fixed number of drafts, and as it would be served: stopping where by its own costs going on would not pay.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.errors import UserError
from distill.context import Run
from distill.identity import environment
from distill.recipe import Recipe
from distill.stages import Say

if TYPE_CHECKING:
    from evaluation.decoder.drafters import DraftModel
    from evaluation.decoder.engine import Request
    from evaluation.decoder.runner import Runner

BATCH_SIZES = (1, 4, 16)
PROMPTS = 32
NGRAM = "n-gram"
STOPS = ", stops early"


@dataclass
class Contestant:
    """A trained drafter and what its training took."""

    recipe: str
    kind: str
    drafter: DraftModel
    counts: list[int]
    """Drafts a round to race with."""
    minutes: float
    trained_tokens: int
    megabytes: float
    """Its weights, without embeddings that are the target's."""


def bench_kinds(recipes: Sequence[Recipe], runs_dir: Path, say: Say) -> dict[str, Any]:
    """The race of the recipes' trained drafters. `rows` has one entry per batch size, drafter and K.

    Raises `UserError` where one is not trained yet, or not for the same target on the same samples.
    """
    from transformers.utils import logging

    from evaluation.decoder.engine import Request

    logging.set_verbosity_error()
    with ExitStack() as stack:
        runs = [Run(recipe, runs_dir, say, stack) for recipe in recipes]
        check_comparable(runs)
        first = runs[0]
        contestants = [enter(run, first) for run in runs]
        prompts = [ids for prompt, ids in first.prompts if prompt.split == "test" and prompt.seen_template]
        new_tokens = first.recipe.evaluate.max_new_tokens
        requests = [Request(ids, new_tokens, number) for number, ids in enumerate(prompts[:PROMPTS])]
        rows: list[dict[str, Any]] = []
        for size in BATCH_SIZES:
            say(f"bench: {len(requests)} prompts by batches of {size}")
            rows += race_kinds(first, contestants, requests, size)
        return {
            "target": first.recipe.target.model,
            "samples": len(first.samples.where(split="train")),
            "prompts": len(requests),
            "new_tokens": new_tokens,
            "serving": first.recipe.serving.model_dump(),
            "environment": environment(),
            "rows": rows,
        }


def check_comparable(runs: Sequence[Run]) -> None:
    """Raise `UserError` unless every run is trained, for one target and on one set of samples."""
    contents = {}
    for run in runs:
        name = run.recipe.name
        if run.stages["train"].manifest() is None:
            raise UserError(f"recipe {name} has no trained drafter here: run `distill train {name}` first.")
        contents[name] = (run.stages["sample"].content(), run.recipe.serving)
    first, *others = contents
    for name in others:
        if contents[name] != contents[first]:
            raise UserError(
                f"recipes {first} and {name} differ in their samples or serving mode, so their drafters do "
                "not compare: give both the same target, data, sample and serving sections, and signal."
            )


def enter(run: Run, first: Run) -> Contestant:
    """A recipe's trained drafter."""
    import json

    from distill.models import load_drafter
    from evaluation.decoder.kinds import kind_of, own_weights

    stage = run.stages["train"]
    manifest = stage.manifest()
    assert manifest is not None
    training = json.loads((stage.directory / "training.json").read_text(encoding="utf-8"))
    drafter = load_drafter(stage.directory / "drafter", run.device)
    weights = own_weights(drafter, first.target.model)
    return Contestant(
        recipe=run.recipe.name,
        kind=kind_of(drafter.model.config),
        drafter=drafter,
        counts=run.recipe.evaluate.num_speculative_tokens,
        minutes=manifest["seconds"] / 60,
        trained_tokens=training["tokens"],
        megabytes=sum(weight.nbytes for weight in weights) / 1e6,
    )


def race_kinds(
    first: Run, contestants: Sequence[Contestant], requests: Sequence[Request], size: int
) -> list[dict[str, Any]]:
    """One row per drafter and K at one batch size."""
    from evaluation.cost_model import predict_speedup, round_cost
    from evaluation.decoder.drafters import ModelDrafter, NgramDrafter
    from evaluation.decoder.engine import Decoder
    from evaluation.decoder.guard import Guard
    from evaluation.decoder.kinds import make_drafter
    from evaluation.decoder.runner import Runner
    from evaluation.decoder.sampling import SamplingOptions
    from evaluation.speed import (
        drafting,
        measure_costs,
        race,
        speedup,
        stop_threshold,
    )

    serving, seed = first.recipe.serving, first.recipe.seed
    options = SamplingOptions(serving.temperature, serving.top_p)
    most = max(count for each in contestants for count in each.counts)
    length = max(len(request.prompt) + request.max_new_tokens for request in requests) + most + 1
    runner: Runner = Runner(first.target.model, size, length)
    settings: dict[str, Any] = {"eos_ids": first.target.eos_ids, "options": options}
    decoders = {"plain": Decoder(runner, **settings)}
    about: dict[str, tuple[Contestant | None, int, dict[str, Any] | None]] = {}
    argmax = serving.draft_sampling == "argmax"
    for number, each in enumerate(contestants):
        drafter: ModelDrafter = make_drafter(each.drafter, runner, options, argmax=argmax, int8=True)
        costs = measure_costs(runner, drafter, range(1, max(each.counts) + 1), size)
        for count in each.counts:
            name = f"{number} {count}"
            decoders[name] = Decoder(runner, drafter=drafter, num_speculative_tokens=count, **settings)
            about[name] = (each, count, costs)
        stopping: ModelDrafter = make_drafter(
            each.drafter, runner, options, argmax=argmax, stop_below=stop_threshold(costs), int8=True
        )
        most = max(each.counts)
        guard = Guard([round_cost(costs, drafts) for drafts in range(most + 1)])
        name = f"{number}{STOPS}"
        decoders[name] = Decoder(
            runner, drafter=stopping, num_speculative_tokens=most, guard=guard, **settings
        )
        about[name] = (each, most, costs)
    fewest = min(count for each in contestants for count in each.counts)
    decoders[NGRAM] = Decoder(runner, drafter=NgramDrafter(), num_speculative_tokens=fewest, **settings)
    about[NGRAM] = (None, fewest, None)
    groups = [requests[start : start + size] for start in range(0, len(requests), size)]
    timings = race(decoders, groups, lambda: None)
    plain = timings["plain"]
    rows = []
    for name, (contestant, count, own) in about.items():
        drafts = drafting(timings[name], count, seed=seed)
        tokens, rounds = drafts["tokens_per_target_call"]["mean"], drafts["rounds_by_steps"]
        rows.append(
            {
                "recipe": contestant.recipe if contestant else None,
                "kind": contestant.kind if contestant else NGRAM,
                "batch_size": size,
                "num_speculative_tokens": count,
                "stops_early": name.endswith(STOPS),
                "conditional_acceptance": drafts["conditional_acceptance"],
                "tokens_per_target_call": drafts["tokens_per_target_call"],
                "first_cost_ratio": own["first_draft_step_ms"] / own["target_step_ms"] if own else None,
                "cost_ratio": own["cost_ratio"] if own else None,
                "predicted_speedup": predict_speedup(
                    tokens, own, rounds, rounds_per_text=drafts["rounds_per_text"]
                )
                if own
                else None,
                "speedup": speedup(plain, timings[name], seed=seed),
                "tokens_per_second": timings[name].tokens_per_second,
                "plain_tokens_per_second": plain.tokens_per_second,
                "training_minutes": contestant.minutes if contestant else 0.0,
                "trained_tokens": contestant.trained_tokens if contestant else 0,
                "megabytes": contestant.megabytes if contestant else 0.0,
            }
        )
    return rows


def report(found: dict[str, Any]) -> str:
    """The race as a Markdown page: the drafters, then a table per batch size."""
    machine = found["environment"]
    lines = [
        f"{found['prompts']} test prompts of known templates, {found['new_tokens']} tokens each, "
        f"{found['samples']} training samples; {found['target']} on {machine['cpu']}, "
        f"commit {machine['commit']}.",
        "",
        "| recipe | kind | training minutes | tokens trained on | weights beside the target's |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    drafters = {(row["recipe"], row["kind"]): row for row in found["rows"] if row["recipe"]}
    lines += [
        f"| {name} | {row['kind']} | {row['training_minutes']:.1f} | {row['trained_tokens']:,} | "
        f"{row['megabytes']:.1f} MB |"
        for (name, _), row in drafters.items()
    ]
    for size in sorted({row["batch_size"] for row in found["rows"]}):
        rows = [row for row in found["rows"] if row["batch_size"] == size]
        lines += [
            "",
            f"Batch {size}, plain decoding {rows[0]['plain_tokens_per_second']:.1f} tokens/s:",
            "",
            "| drafter | K | acceptance by position | tokens per target call | cost of the first draft | "
            "of each further one | predicted | measured speedup |",
            "| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |",
        ]
        lines += [_line(row) for row in sorted(rows, key=lambda row: -row["speedup"]["mean"])]
    return "\n".join(lines) + "\n"


def _line(row: dict[str, Any]) -> str:
    tokens, gain = row["tokens_per_target_call"], row["speedup"]
    by_position = " ".join(_number(value) for value in row["conditional_acceptance"])
    return (
        f"| {row['recipe'] or row['kind']} | "
        f"{'up to ' * row['stops_early']}{row['num_speculative_tokens']} | "
        f"{by_position} | "
        f"{tokens['mean']:.2f} [{tokens['low']:.2f}, {tokens['high']:.2f}] | "
        f"{_number(row['first_cost_ratio'])} | {_number(row['cost_ratio'])} | "
        f"{_number(row['predicted_speedup'])} | "
        f"{gain['mean']:.2f} [{gain['low']:.2f}, {gain['high']:.2f}] |"
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
