"""The results of `distill bench alignment` as Markdown tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from distill.bench.alignment import BASELINE, COUNTS
from distill.bench.race_report import tables
from evaluation.acceptance import bootstrap_ratio
from evaluation.cost_model import round_cost

Rows = list[dict[str, Any]]


def report(found: dict[str, Any], command: str) -> str:
    """All arms in one table, each against the baseline, then acceptance by task: the body of a page."""
    arms, seeds = found["arms"], found["seeds"]
    place, commits = found["environment"], sorted({str(arm["commit"]) for arm in arms.values()})
    lines = [
        f"`{command}` on {place['cpu']} ({place['threads']} threads), commit {', '.join(commits)}.",
        "",
        f"{found['recipe']}: {found['tokens']:,} tokens trained per arm out of {found['sampled_tokens']:,} "
        f"sampled ones, learning rate {found['learning_rate']:g}, seed {' and '.join(map(str, seeds))}. "
        f"Measured teacher-forced on {found['test_samples']} test samples ({found['test_tokens']:,} tokens) "
        "after the last step: greedy acceptance along text of temperature 0; sampled (sum of min) and argmax "
        "(the target's probability of the drafter's best id) at temperature "
        f"{found['temperature']:g} along text drawn at it. Intervals are 95 % bootstrap intervals over "
        "samples; differences are paired.",
        "",
        *_overview(arms, found["temperature"]),
        "",
        "Greedy acceptance at temperature 0, by task:",
        "",
        *_by_task(arms),
        *_raced(found["race"]),
    ]
    return "\n".join(lines) + "\n"


def _overview(arms: dict[str, Any], temperature: float) -> list[str]:
    baselines = {arm["seed"]: arm["samples"] for arm in arms.values() if arm["arm"] == BASELINE}
    heads = ["arm", "greedy seen", "greedy unseen"]
    if baselines:
        heads.append(f"greedy - {BASELINE}")
    heads += ["sampled", "argmax"]
    if baselines:
        heads.append(f"sampled - {BASELINE}")
    heads += [f"tokens per call, K {count}, T 0" for count in COUNTS]
    heads += [f"K {COUNTS[0]}, T {temperature:g}", "c", f"predicted speedup, K {COUNTS[0]}, T 0", "minutes"]
    lines = [_row(heads), _row(["---"] * len(heads))]
    for name, arm in arms.items():
        rows, seed = arm["samples"], arm["seed"]
        cold, warm = _at(rows, 0.0), _at(rows, temperature)
        cells = [name, _mean([r for r in cold if r["seen"]], "greedy")]
        cells.append(_mean([r for r in cold if not r["seen"]], "greedy"))
        base = baselines.get(seed)
        if base is not None:
            cells.append(_difference(cold, _at(base, 0.0), "greedy", seed))
        cells += [_mean(warm, "sampled"), _mean(warm, "argmax")]
        if base is not None:
            cells.append(_difference(warm, _at(base, temperature), "sampled", seed))
        cells += [_per_call(cold, count, seed) for count in COUNTS]
        cells.append(_per_call(warm, COUNTS[0], seed))
        costs = arm["costs"]
        cells.append("-" if costs is None else f"{costs['cost_ratio']:.3f}")
        calls = _sum(cold, f"calls_{COUNTS[0]}")
        if costs is None or calls == 0:
            cells.append("-")
        else:
            cells.append(f"{_tokens(cold) / calls / round_cost(costs, COUNTS[0]):.2f}")
        cells.append(f"{'> ' if arm['resumed'] else ''}{arm['seconds'] / 60:.1f}")
        lines.append(_row(cells))
    return lines


def _by_task(arms: dict[str, Any]) -> list[str]:
    first = next(iter(arms.values()))["samples"]
    tasks = sorted({row["task"] for row in _at(first, 0.0)})
    counts = {task: sum(row["tokens"] for row in _at(first, 0.0) if row["task"] == task) for task in tasks}
    lines = [_row(["arm", *(f"{task} ({counts[task]} tokens)" for task in tasks)])]
    lines.append(_row(["---"] * (1 + len(tasks))))
    for name, arm in arms.items():
        cold = _at(arm["samples"], 0.0)
        lines.append(
            _row([name, *(_mean([r for r in cold if r["task"] == task], "greedy") for task in tasks)])
        )
    return lines


def _raced(race: dict[str, Any]) -> list[str]:
    if not race:
        return []
    said = f"{race['prompts']} test prompts of known templates, {race['new_tokens']} tokens each, in turns."
    return ["", f"Decoding {said}", *tables(race["rows"])]


def _at(rows: Rows, temperature: float) -> Rows:
    return [row for row in rows if row["temperature"] == temperature]


def _sum(rows: Rows, key: str) -> float:
    return float(sum(row[key] for row in rows))


def _tokens(rows: Rows) -> float:
    """Tokens that decoding makes, the first of each text being the prefill's."""
    return float(sum(row["tokens"] - 1 for row in rows))


def _mean(rows: Rows, key: str) -> str:
    return f"{_sum(rows, key) / _sum(rows, 'tokens'):.3f}" if rows else "-"


def _per_call(rows: Rows, count: int, seed: int) -> str:
    rows = [row for row in rows if row["tokens"] > 1]
    if not rows:
        return "-"
    made, calls = _array(rows, lambda row: row["tokens"] - 1), _array(rows, lambda row: row[f"calls_{count}"])
    found = bootstrap_ratio(made, calls, seed=seed)
    return f"{found['mean']:.2f} [{found['low']:.2f}, {found['high']:.2f}]"


def _difference(rows: Rows, base: Rows, key: str, seed: int) -> str:
    """The paired difference of two arms over the same samples."""
    if not rows:
        return "-"
    gained = _array(rows, lambda row: row[key]) - _array(base, lambda row: row[key])
    found = bootstrap_ratio(gained, _array(rows, lambda row: row["tokens"]), seed=seed)
    return f"{found['mean']:+.3f} [{found['low']:+.3f}, {found['high']:+.3f}]"


def _array(rows: Rows, value: Callable[[dict[str, Any]], float]) -> np.ndarray:
    return np.array([value(row) for row in rows], dtype=np.float64)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
