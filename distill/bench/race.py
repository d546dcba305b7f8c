"""Trained drafters in one race: they, n-gram look-up and plain decoding take turns on the same test prompts
over one target runner, and costs are measured in the same run.

Each drafter races with a fixed number of drafts, and as it would be served: stopping where by its own costs
going on would not pay, and with trees as large as by the costs they pay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from data.errors import UserError
from distill.context import Run

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from evaluation.decoder.drafters import DraftModel
    from evaluation.decoder.engine import Decoder, Request
    from evaluation.decoder.runner import Runner
    from evaluation.speed import Timing

NGRAM = "n-gram"
FIXED, STOPS, TREE = "fixed", "stops early", "tree"


@dataclass
class Contestant:
    """A trained drafter and what its training took."""

    name: str
    """Of its recipe, or of what sets it apart from the others."""
    kind: str
    drafter: DraftModel
    counts: list[int]
    """Drafts a round to race with."""
    minutes: float | None
    """None where training was resumed: only its last session was timed."""
    trained_tokens: int
    megabytes: float
    """Its weights, without embeddings that are the target's."""
    rates: list[list[float]] | None = None
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


def contestant(
    name: str,
    drafter: DraftModel,
    target: PreTrainedModel,
    *,
    counts: list[int],
    minutes: float | None,
    trained_tokens: int,
    rates: list[list[float]] | None = None,
) -> Contestant:
    """`drafter` in the race, its kind and size read off it."""
    from evaluation.decoder.kinds import kind_of, own_weights

    kind = kind_of(drafter.model.config)
    megabytes = sum(weight.nbytes for weight in own_weights(drafter, target)) / 1e6
    return Contestant(name, kind, drafter, counts, minutes, trained_tokens, megabytes, rates)


def race_requests(run: Run) -> list[Request]:
    """The recipe's first test prompts of known templates, as many and as long as it evaluates with."""
    from evaluation.decoder.engine import Request

    prompts = [ids for prompt, ids in run.prompts if prompt.split == "test" and prompt.seen_template]
    if not prompts:
        raise UserError(f"recipe {run.recipe.name} has no test prompts of known templates to race on.")
    config = run.recipe.evaluate
    return [
        Request(ids, config.max_new_tokens, number) for number, ids in enumerate(prompts[: config.prompts])
    ]


def race_drafters(
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
        "drafter": contestant.name if contestant else None,
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
