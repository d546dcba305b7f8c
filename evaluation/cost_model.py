"""The cost model over K and batch size: what the measured forwards and acceptances predict, and so which K
to serve (0 included), at which acceptance speculation breaks even, and from which batch size on it stops
paying.

A round with K drafts costs, in target steps, 1 + c_first + (K - 1) c + v_K (`evaluation.speed`), each
measured at its batch size: the more rows share a target step, the less a wider one is free. Every answer
also costs the drafter's reading of its prompt, while the whole batch waits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from evaluation.decoder.drafters import DraftModel

BATCH_SIZES = (1, 4, 16)
STEEP = (1, 2, 3, 5)
"""Drafts a round from one to the next of which a wider check gets dearer fast, in jumps."""
REPEATS = 7  # these forwards are long, and their medians vary by a few percent


def measure_by_batch(
    target: PreTrainedModel,
    drafter: DraftModel,
    counts: Sequence[int],
    batch_sizes: Sequence[int],
    prompt_tokens: int | None = None,
) -> list[dict[str, Any]]:
    """The forwards of a round for every batch size, in milliseconds, at the widths of `counts` drafts."""
    from evaluation.decoder.drafters import context_of
    from evaluation.decoder.kinds import make_drafter
    from evaluation.decoder.runner import Runner
    from evaluation.decoder.sampling import SamplingOptions
    from evaluation.speed import TYPICAL_POSITION, measure_costs

    limits = [context_of(model) for model in (target, drafter.model)]
    reading = prompt_tokens or TYPICAL_POSITION
    length = min([max(TYPICAL_POSITION + max(counts) + 1, reading), *limits])
    runner = Runner(target, max(batch_sizes), length)
    model_drafter = make_drafter(drafter, runner, SamplingOptions(), int8=True)
    return [
        measure_costs(runner, model_drafter, counts, size, repeats=REPEATS, prompt_tokens=reading)
        for size in batch_sizes
    ]


def round_cost(costs: Mapping[str, Any], count: int, cost_ratio: float | None = None) -> float:
    """Cost of a round with `count` drafts in target steps of its batch size; 1 for none.

    1 + c_first + (count - 1) c + v, the formula of Leviathan et al. 2023 (theorem 3.8) with each cost at its
    true width. What a wider check adds is interpolated between the widths that were measured. `cost_ratio`
    asks for another drafter's c, 0 for a look-up; its first step then costs c too.
    """
    from evaluation.speed import verify_overhead

    if count == 0:
        return 1.0
    step = float(costs["cost_ratio"]) if cost_ratio is None else cost_ratio
    first = costs["first_draft_step_ms"] / costs["target_step_ms"] if cost_ratio is None else cost_ratio
    return float(1 + first + (count - 1) * step + verify_overhead(costs, count))


def reading_cost(costs: Mapping[str, Any]) -> float:
    """Target steps of its batch size for which all rows wait while the drafter reads the prompt of one, times
    those rows: rounds are counted by row.
    """
    return float(costs["draft_reading_ms"] * costs["batch_size"] / costs["target_step_ms"])


def predict_speedup(
    tokens_per_call: float,
    costs: Mapping[str, Any],
    rounds_by_steps: Sequence[int],
    *,
    rounds_per_text: float | None = None,
    columns_beside: int = 0,
    cost_ratio: float | None = None,
) -> float:
    """Speedup that the cost model expects: tokens per target call over a round's mean cost in target steps.

    `rounds_by_steps[n]` rounds had n draft steps, and all together `columns_beside` more than those to check,
    which are taken as spread evenly over those that drafted. With `rounds_per_text`, each answer also costs
    the drafter's reading of its prompt. `cost_ratio` as in `round_cost`; a look-up reads nothing.
    """
    from evaluation.speed import verify_overhead

    total = sum(rounds * round_cost(costs, steps, cost_ratio) for steps, rounds in enumerate(rounds_by_steps))
    beside = columns_beside / max(sum(rounds_by_steps[1:]), 1)
    for steps, rounds in enumerate(rounds_by_steps[1:], start=1):
        total += rounds * (verify_overhead(costs, steps + beside) - verify_overhead(costs, steps))
    cost = total / sum(rounds_by_steps)
    if rounds_per_text and cost_ratio != 0:
        cost += reading_cost(costs) / rounds_per_text
    return tokens_per_call / cost


def break_even_acceptance(costs: Mapping[str, Any], count: int) -> float | None:
    """The acceptance per token, the same at every position, at which `count` drafts a round neither gain nor
    lose: sum of a^i for i = 0 .. count equals the round's cost (Leviathan et al. 2023, equation 1). None
    where not even 1 suffices.
    """
    from scipy.optimize import brentq

    cost = round_cost(costs, count)
    if cost <= 1 or cost >= count + 1:
        return 0.0 if cost <= 1 else None
    return float(brentq(lambda rate: sum(rate**i for i in range(count + 1)) - cost, 0.0, 1.0))


def predict(
    by_batch: Sequence[Mapping[str, Any]],
    foretold: Mapping[int, Mapping[str, float]],
    handicaps: Mapping[int, float],
) -> dict[str, Any]:
    """The predictions for every (batch size, K), the best K per batch size, and where it stops paying; and
    per batch size whether a tree may pay or a `chain` is better (`evaluation.speed.sibling_threshold`).

    `foretold`: by K from 0 on, tokens per target call and rounds of an answer
    (`evaluation.replay.rounds_by_count`). `handicaps`: our plain decoding over the fastest plain path, at
    most 1, of the batch sizes where another path was measured; every speedup is over the fastest.
    """
    from evaluation.speed import CHAIN_FROM, sibling_threshold

    table = []
    for costs in by_batch:
        handicap = handicaps.get(costs["batch_size"], 1.0)
        for count, told in foretold.items():
            cost = round_cost(costs, count)
            cost += reading_cost(costs) / told["rounds_per_text"] if count else 0.0
            table.append(
                {
                    "batch_size": costs["batch_size"],
                    "num_speculative_tokens": count,
                    "tokens_per_target_call": told["tokens_per_target_call"],
                    "round_cost": cost,
                    "speedup": handicap * told["tokens_per_target_call"] / cost,
                    "break_even_acceptance": break_even_acceptance(costs, count),
                }
            )
    best = []
    for costs in by_batch:
        own = [row for row in table if row["batch_size"] == costs["batch_size"]]
        fastest = max(own, key=lambda row: row["speedup"])
        above = sibling_threshold(costs)
        shape = {"sibling_above": above, "chain": above >= CHAIN_FROM}
        best.append({**fastest, "speculate": fastest["speedup"] > 1, **shape})
    return {"costs": list(by_batch), "table": table, "best": best, "stops_paying_at": stops_paying_at(best)}


def best_count(table: Sequence[Mapping[str, Any]], batch_size: int) -> int:
    """The K, at least 1, that the `table` of `predict` thinks most of at a batch size."""
    own = [row for row in table if row["batch_size"] == batch_size and row["num_speculative_tokens"]]
    return int(max(own, key=lambda row: row["speedup"])["num_speculative_tokens"])


def stops_paying_at(best: Sequence[Mapping[str, Any]]) -> float | None:
    """The batch size at which the best K's predicted speedup crosses 1, between two measured batch sizes on a
    logarithmic scale. None where it pays at the largest; the smallest where it never does.
    """
    if best[0]["speedup"] <= 1:
        return float(best[0]["batch_size"])
    for before, after in pairwise(best):
        if after["speedup"] <= 1:
            part = (before["speedup"] - 1) / (before["speedup"] - after["speedup"])
            span = math.log(after["batch_size"] / before["batch_size"])
            return float(before["batch_size"] * math.exp(part * span))
    return None


def chain_or_tree(best: Sequence[Mapping[str, Any]]) -> str:
    """What the best rows of `predict` say of a drafter's second choices, beside its chain, by batch size."""
    pays = [f"{row['sibling_above']:.2f} at batch {row['batch_size']}" for row in best if not row["chain"]]
    chains = [str(row["batch_size"]) for row in best if row["chain"]]
    said = (
        [f"Checking a second choice too pays where it is at least as likely as {', '.join(pays)}"]
        if pays
        else []
    )
    said += [f"a chain is better than any tree at batch {', '.join(chains)}"] if chains else []
    sentence = "; ".join(said)
    return f"{sentence[:1].upper()}{sentence[1:]}."


def time_shares(
    costs: Mapping[str, Any], rounds_by_steps: Sequence[int], rounds_per_text: float
) -> dict[str, float]:
    """Where the time of the measured rounds goes, as shares of their predicted time: the target step that
    plain decoding takes too, drafting (with the reading of prompts), and what checking several tokens adds.
    """
    first = costs["first_draft_step_ms"] / costs["target_step_ms"]
    rounds = sum(rounds_by_steps)
    draft, verify = rounds * reading_cost(costs) / rounds_per_text, 0.0
    for count, number in enumerate(rounds_by_steps):
        drafting = first + (count - 1) * costs["cost_ratio"] if count else 0.0
        draft += number * drafting
        verify += number * (round_cost(costs, count) - 1 - drafting)
    total = rounds + draft + verify
    return {"target_step": rounds / total, "drafting": draft / total, "wider_check": verify / total}
