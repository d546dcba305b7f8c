"""`distill bench kinds`: drafters of several kinds for one target, trained on the same samples, in one race.

Each recipe's trained drafter, n-gram look-up and plain decoding take turns on the same test prompts, batch
size by batch size, over one target runner; costs are measured in the same run. Each drafter races with
a fixed number of drafts, and as it would be served: stopping where by its own costs going on would not pay,
and with trees as large as by the costs they pay.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.errors import UserError
from distill.context import Run
from distill.identity import environment
from distill.recipe import Recipe
from distill.stages import Say

if TYPE_CHECKING:
    from evaluation.decoder.drafters import DraftModel
    from evaluation.decoder.engine import Decoder, Request
    from evaluation.decoder.runner import Runner
    from evaluation.speed import Timing

BATCH_SIZES = (1, 4, 16)
RATES_BATCH = 16
NGRAM = "n-gram"
FIXED, STOPS, TREE = "fixed", "stops early", "tree"


@dataclass
class Contestant:
    """A trained drafter and what its training took."""

    recipe: str
    kind: str
    drafter: DraftModel
    counts: list[int]
    """Drafts a round to race with."""
    minutes: float | None
    """None where training was resumed: only its last session was timed."""
    trained_tokens: int
    megabytes: float
    """Its weights, without embeddings that are the target's."""
    rates: list[list[float]] | None
    """Of Medusa: how often each rank of each head was right on the select split, which shapes its tree."""


@dataclass
class Racer:
    """A decoder in the race."""

    contestant: Contestant | None
    """None for look-up."""
    mode: str
    """With a fixed number of drafts, with up to so many as it stops early, or with trees as deep at most."""
    count: int
    decoder: Decoder
    costs: dict[str, Any] = field(default_factory=dict)


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
        for run in runs[1:]:
            run.target = first.target  # loaded once
        contestants = [enter(run, first) for run in runs]
        prompts = [ids for prompt, ids in first.prompts if prompt.split == "test" and prompt.seen_template]
        if not prompts:
            raise UserError(f"recipe {first.recipe.name} has no test prompts of known templates to race on.")
        config = first.recipe.evaluate
        requests = [
            Request(ids, config.max_new_tokens, number)
            for number, ids in enumerate(prompts[: config.prompts])
        ]
        rows: list[dict[str, Any]] = []
        for size in [size for size in BATCH_SIZES if size <= len(requests)]:
            say(f"bench: {len(requests)} prompts by batches of {size}")
            rows += race_kinds(first, contestants, requests, size)
        return {
            "target": first.recipe.target.model,
            "samples": len(first.samples.where(split="train")),
            "prompts": len(requests),
            "new_tokens": config.max_new_tokens,
            "serving": first.recipe.serving.model_dump(),
            "environment": environment(),
            "rows": rows,
        }


def check_comparable(runs: Sequence[Run]) -> None:
    """Raise `UserError` unless every run is trained, for one target and on one set of samples, whatever each
    keeps of the target's signals.
    """
    contents: dict[str, Any] = {}
    for run in runs:
        name = f"{run.recipe.name} ({run.recipe.draft.kind})"
        if name in contents:
            raise UserError(f"two of the recipes are called {name}: give one of them another file name.")
        if run.stages["train"].manifest() is None:
            raise UserError(
                f"recipe {name} has no trained drafter here: run `distill train` with it and the same "
                "settings first."
            )
        manifest = run.stages["sample"].manifest()
        assert manifest is not None, "what is trained was sampled"
        texts = {file: entry for file, entry in manifest["files"].items() if file.endswith(".parquet")}
        contents[name] = (texts, run.recipe.serving)
    first, *others = contents
    for name in others:
        if contents[name] != contents[first]:
            raise UserError(
                f"recipes {first} and {name} differ in their samples or serving mode, so their drafters do "
                "not compare: give both the same seed, target, data, sample and serving sections, and "
                "evaluate.prompts."
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
        minutes=None if manifest.get("resumed") else manifest["seconds"] / 60,
        trained_tokens=training["tokens"],
        megabytes=sum(weight.nbytes for weight in weights) / 1e6,
        rates=static_rates(run, drafter),
    )


def static_rates(run: Run, drafter: DraftModel) -> list[list[float]] | None:
    """What shapes Medusa's tree; None for the other kinds, whose trees follow their own confidence."""
    from evaluation.acceptance import rank_rates
    from evaluation.decoder.kinds import kind_of
    from evaluation.signals import target_signals

    if kind_of(drafter.model.config) != "medusa":
        return None
    temperature = run.recipe.serving.temperature
    return rank_rates(
        drafter,
        run.target.model,
        run.samples.where(split="select"),
        2 * max(run.recipe.evaluate.num_speculative_tokens),
        temperature=temperature,
        batch_size=RATES_BATCH,
        signals=partial(target_signals, run.target.model, temperature=temperature or 1.0),
    )


def race_kinds(
    first: Run, contestants: Sequence[Contestant], requests: Sequence[Request], size: int
) -> list[dict[str, Any]]:
    """One row per drafter, mode and K at one batch size."""
    from evaluation.decoder.engine import Decoder
    from evaluation.decoder.ngram import NgramDrafter
    from evaluation.decoder.runner import Runner
    from evaluation.decoder.sampling import SamplingOptions
    from evaluation.speed import race

    serving = first.recipe.serving
    options = SamplingOptions(serving.temperature, serving.top_p)
    settings: dict[str, Any] = {"eos_ids": first.target.eos_ids, "options": options}
    counts = [count for each in contestants for count in each.counts]
    length = max(len(request.prompt) + request.max_new_tokens for request in requests) + 2 * max(counts) + 1
    runner: Runner = Runner(first.target.model, size, length)
    argmax = serving.draft_sampling == "argmax"
    racers = [racer for each in contestants for racer in enter_modes(each, runner, argmax, settings)]
    look_up = Decoder(runner, drafter=NgramDrafter(), num_speculative_tokens=min(counts), **settings)
    racers.append(Racer(None, FIXED, min(counts), look_up))
    decoders = {str(number): racer.decoder for number, racer in enumerate(racers)}
    groups = [requests[start : start + size] for start in range(0, len(requests), size)]
    timings = race({"plain": Decoder(runner, **settings), **decoders}, groups, lambda: None)
    plain = timings.pop("plain")
    return [
        _row(racer, timing, plain, size, first.recipe.seed)
        for racer, timing in zip(racers, timings.values(), strict=True)
    ]


def enter_modes(
    contestant: Contestant, runner: Runner, argmax: bool, settings: dict[str, Any]
) -> list[Racer]:
    """A contestant in every mode, by costs that are measured here; without trees where by the cost model a
    chain is better.
    """
    from evaluation.contestants import guard
    from evaluation.decoder.engine import Decoder
    from evaluation.decoder.kinds import make_drafter, make_tree_drafter
    from evaluation.speed import (
        CHAIN_FROM,
        measure_costs,
        node_prices,
        sibling_threshold,
        stop_threshold,
    )

    weights, options = contestant.drafter, settings["options"]
    drafter = make_drafter(weights, runner, options, argmax=argmax, int8=True)
    most = max(contestant.counts)
    costs = measure_costs(runner, drafter, range(1, 2 * most + 1), runner.cache.num_rows)

    def racer(mode: str, count: int, own: Any, **more: Any) -> Racer:
        decoder = Decoder(runner, drafter=own, num_speculative_tokens=count, **settings, **more)
        return Racer(contestant, mode, count, decoder, costs)

    racers = [racer(FIXED, count, drafter) for count in contestant.counts]
    stopping: dict[str, Any] = {"stop_below": stop_threshold(costs), "int8": True}
    early = make_drafter(weights, runner, options, argmax=argmax, **stopping)
    racers.append(racer(STOPS, most, early, guard=guard(costs, most)))
    if sibling_threshold(costs) < CHAIN_FROM:
        tree = make_tree_drafter(weights, runner, options, node_prices(costs), contestant.rates, **stopping)
        racers.append(racer(TREE, most, tree, guard=guard(costs, most)))
    return racers


def _row(racer: Racer, timing: Timing, plain: Timing, size: int, seed: int) -> dict[str, Any]:
    from evaluation.cost_model import predict_speedup
    from evaluation.speed import drafting, sibling_threshold, speedup

    contestant, costs = racer.contestant, racer.costs
    drafts = drafting(timing, racer.count, seed=seed)
    tokens, rounds = drafts["tokens_per_target_call"]["mean"], drafts["rounds_by_steps"]
    row = {
        "recipe": contestant.recipe if contestant else None,
        "kind": contestant.kind if contestant else NGRAM,
        "batch_size": size,
        "mode": racer.mode,
        "num_speculative_tokens": racer.count,
        "conditional_acceptance": drafts["conditional_acceptance"],
        "siblings_per_round": drafts["siblings"] / drafts["rounds"],
        "tokens_per_target_call": drafts["tokens_per_target_call"],
        "speedup": speedup(plain, timing, seed=seed),
        "tokens_per_second": timing.tokens_per_second,
        "plain_tokens_per_second": plain.tokens_per_second,
        "training_minutes": contestant.minutes if contestant else 0.0,
        "trained_tokens": contestant.trained_tokens if contestant else 0,
        "megabytes": contestant.megabytes if contestant else 0.0,
    }
    if not costs:
        names = ("first_cost_ratio", "cost_ratio", "sibling_above", "predicted_speedup")
        return row | dict.fromkeys(names)
    return row | {
        "first_cost_ratio": costs["first_draft_step_ms"] / costs["target_step_ms"],
        "cost_ratio": costs["cost_ratio"],
        "sibling_above": sibling_threshold(costs),
        "predicted_speedup": predict_speedup(
            tokens,
            costs,
            rounds,
            rounds_per_text=drafts["rounds_per_text"],
            columns_beside=drafts["columns_beside"],
        ),
    }


def report(found: dict[str, Any]) -> str:
    """The race as a Markdown page: the drafters, then a table per batch size."""
    machine = found["environment"]
    lines = [
        f"{found['prompts']} test prompts of known templates, {found['new_tokens']} tokens each, "
        f"{found['samples']} training samples; {found['target']} on {machine['cpu']}, "
        f"commit {machine['commit']}.",
        "",
        "| recipe | kind | training minutes | tokens trained on | a minute | weights beside the target's |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    drafters = {(row["recipe"], row["kind"]): row for row in found["rows"] if row["recipe"]}
    lines += [
        f"| {name} | {row['kind']} | {_training(row)} | {row['megabytes']:.1f} MB |"
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
        lines += ["", *_chain_or_tree(rows)]
    return "\n".join(lines) + "\n"


def _training(row: dict[str, Any]) -> str:
    """Minutes, tokens, and tokens a minute."""
    minutes, tokens = row["training_minutes"], row["trained_tokens"]
    return (
        f"- | {tokens:,} | -" if minutes is None else f"{minutes:.1f} | {tokens:,} | {tokens / minutes:,.0f}"
    )


def _chain_or_tree(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What the cost model says of each drafter's second choices at one batch size."""
    from evaluation.cost_model import chain_or_tree
    from evaluation.speed import CHAIN_FROM

    found = {(row["recipe"], row["kind"]): row for row in rows if row["recipe"]}
    return [
        f"- {name}: {chain_or_tree([{**row, 'chain': row['sibling_above'] >= CHAIN_FROM}])}"
        for (name, _), row in found.items()
    ]


def _line(row: dict[str, Any]) -> str:
    from evaluation.tables import number

    tokens, gain = row["tokens_per_target_call"], row["speedup"]
    by_position = " ".join(number(value) for value in row["conditional_acceptance"])
    return (
        f"| {row['recipe'] or row['kind']} | "
        f"{_shape(row)} | "
        f"{by_position} | "
        f"{tokens['mean']:.2f} [{tokens['low']:.2f}, {tokens['high']:.2f}] | "
        f"{number(row['first_cost_ratio'])} | {number(row['cost_ratio'])} | "
        f"{number(row['predicted_speedup'])} | "
        f"{gain['mean']:.2f} [{gain['low']:.2f}, {gain['high']:.2f}] |"
    )


def _shape(row: dict[str, Any]) -> str:
    """How many drafts a round."""
    count = row["num_speculative_tokens"]
    if row["mode"] == TREE:
        return f"tree of up to {count} levels, {row['siblings_per_round']:.1f} siblings a round"
    return f"{'up to ' * (row['mode'] == STOPS)}{count}"
