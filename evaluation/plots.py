"""Plots of an evaluation: each a PNG with its numbers as CSV beside it, and an SVG for the page.

Every function takes evaluation.json (or the training history) as plain data. A plot whose numbers were not
measured is not drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from data.files import write_atomic
from evaluation.figures import (
    COLOURS,
    MARKERS,
    Plot,
    bars,
    errors,
    finish,
    grouped,
    literal,
    new_figure,
    plain_line,
    triple,
)
from evaluation.measures import as_served, split_label
from evaluation.tables import DRAFTER_NAMES, subtitle

MEASURES = ("greedy", "sampled", "argmax")


def draw_plots(evaluation: Mapping[str, Any], history: Sequence[Mapping[str, float]]) -> list[Plot]:
    """Every plot that the data allow, in the order of the page."""
    drawers: list[Callable[[Mapping[str, Any]], Plot | None]] = [
        plot_speedup,
        plot_batches,
        plot_positions,
        plot_tasks,
        plot_acceptance,
        lambda data: plot_curve(data, "entropy"),
        lambda data: plot_curve(data, "answer"),
        lambda data: plot_training(history),
    ]
    return [plot for draw in drawers if (plot := draw(evaluation)) is not None]


def write_plots(
    evaluation: Mapping[str, Any], history: Sequence[Mapping[str, float]], out_dir: Path
) -> list[Path]:
    """Every plot that the data allow; returns the files written, PNG and CSV."""
    written = []
    for plot in draw_plots(evaluation, history):
        for suffix, content in ((".png", plot.png()), (".csv", plot.csv())):
            written.append(Path(out_dir) / f"{plot.name}{suffix}")
            write_atomic(written[-1], content)
    return written


def plot_speedup(evaluation: Mapping[str, Any]) -> Plot | None:
    """Speedup over K, measured and predicted, for the drafter and n-gram look-up, by split."""
    rows = [row for row in evaluation.get("decode") or [] if row["drafter"] in DRAFTER_NAMES]
    series = grouped(rows, "drafter", "split")
    if not series:
        return None
    figure, axes = new_figure()
    table: list[list[Any]] = []
    for index, ((drafter, split), points) in enumerate(series.items()):
        points = sorted(points, key=lambda row: row["num_speculative_tokens"])
        widths = [row["num_speculative_tokens"] for row in points]
        means = [row["speedup"]["mean"] for row in points]
        colour, name = COLOURS[index], f"{DRAFTER_NAMES[drafter]}, {split_label(evaluation, split)}"
        axes.errorbar(
            widths,
            means,
            yerr=errors([row["speedup"] for row in points]),
            marker=MARKERS[index],
            color=colour,
            capsize=3,
            label=f"{name}, measured",
        )
        predicted = [row.get("predicted_speedup") for row in points]
        if any(value is not None for value in predicted):
            axes.plot(
                widths,
                [float("nan") if value is None else value for value in predicted],
                linestyle=":",
                marker=MARKERS[index],
                markerfacecolor="none",
                color=colour,
                label=f"{name}, predicted",
            )
        for row, value in zip(points, predicted, strict=True):
            table.append([drafter, split, row["num_speculative_tokens"], *triple(row["speedup"]), value])
    batch = (evaluation.get("serving") or {}).get("batch_size", 1)
    table_of_all = (evaluation.get("cost_model") or {}).get("table") or []
    model = [row for row in table_of_all if row["batch_size"] == batch]
    if model:
        axes.plot(
            [row["num_speculative_tokens"] for row in model],
            [row["speedup"] for row in model],
            linestyle=(0, (1, 3)),
            color="black",
            label=f"drafter, {split_label(evaluation, 'seen')}, cost model for any K",
        )
        table += [
            ["cost model", "", row["num_speculative_tokens"], "", "", "", row["speedup"]] for row in model
        ]
    plain_line(axes)
    axes.set_xticks(sorted({row["num_speculative_tokens"] for row in [*rows, *model]}))
    axes.set_xlabel("speculative tokens per round (K)")
    axes.set_ylabel("speedup over plain decoding")
    axes.set_title(subtitle(evaluation), fontsize=9)
    heading = ["drafter", "split", "num_speculative_tokens", "speedup", "low", "high", "predicted"]
    return finish(figure, axes, "speedup", "Speedup over K", heading, table)


def plot_batches(evaluation: Mapping[str, Any]) -> Plot | None:
    """The best K's speedup over batch size, predicted and, where it was measured, measured."""
    best = (evaluation.get("cost_model") or {}).get("best") or []
    if not best:
        return None
    figure, axes = new_figure()
    table: list[list[Any]] = []
    sizes = [row["batch_size"] for row in best]
    axes.plot(
        sizes,
        [row["speedup"] for row in best],
        linestyle=":",
        marker=MARKERS[0],
        markerfacecolor="none",
        color=COLOURS[0],
        label="best K by the cost model (0 where it does not pay)",
    )
    for row in best:
        label = f"K = {row['num_speculative_tokens']}"
        axes.annotate(
            label, (row["batch_size"], row["speedup"]), (0, 6), textcoords="offset points", fontsize=8
        )
        table.append(["cost model", row["batch_size"], row["num_speculative_tokens"], row["speedup"], "", ""])
    split = (evaluation.get("best") or {}).get("split")
    measured = [*(evaluation.get("decode") or []), *(evaluation.get("batches") or [])]
    for index, drafter in enumerate(("adaptive", "model"), start=1):
        own = [row for row in measured if row["drafter"] == drafter and row["split"] == split]
        fastest = _fastest_by_batch(own)
        if fastest:
            axes.errorbar(
                list(fastest),
                [row["speedup"]["mean"] for row in fastest.values()],
                yerr=errors([row["speedup"] for row in fastest.values()]),
                marker=MARKERS[index],
                color=COLOURS[index],
                capsize=3,
                label=f"{DRAFTER_NAMES[drafter]}, measured",
            )
        for size, row in fastest.items():
            table.append([drafter, size, row["num_speculative_tokens"], *triple(row["speedup"])])
    plain_line(axes)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xlabel("batch size")
    axes.set_ylabel("speedup over plain decoding")
    heading = ["drafter", "batch_size", "num_speculative_tokens", "speedup", "low", "high"]
    return finish(figure, axes, "batches", "Speedup over batch size", heading, table)


def plot_acceptance(evaluation: Mapping[str, Any]) -> Plot | None:
    """The three acceptances by split and sample temperature, before and after training."""
    found = {
        when: [row for row in evaluation.get(key) or [] if row["task"] == "all"]
        for when, key in (("before", "acceptance_before"), ("after", "acceptance"))
    }
    groups = sorted({(row["split"], row["temperature"]) for rows in found.values() for row in rows})
    series = {
        f"{measure}, {when}": {(row["split"], row["temperature"]): row.get(measure) for row in rows}
        for measure in MEASURES
        for when, rows in found.items()
        if any(row.get(measure) for row in rows)
    }
    if not series:
        return None
    figure, axes = new_figure(width=1.2 * len(groups) * len(series) / 2 + 3)
    labels = [f"{split_label(evaluation, split)}\ntemperature {heat:g}" for split, heat in groups]
    bars(axes, labels, [[values.get(group) for group in groups] for values in series.values()], list(series))
    axes.set_ylabel("acceptance per token")
    axes.set_ylim(0, 1)
    table = [
        [split, temperature, *name.split(", "), *triple(values.get((split, temperature)))]
        for name, values in series.items()
        for split, temperature in groups
    ]
    heading = ["split", "temperature", "measure", "when", "acceptance", "low", "high"]
    return finish(figure, axes, "acceptance", "Acceptance before and after training", heading, table)


def plot_positions(evaluation: Mapping[str, Any]) -> Plot | None:
    """Acceptance at each drafted position where all before it were accepted, at the largest K measured."""
    rows = [row for row in evaluation.get("decode") or [] if row.get("conditional_acceptance")]
    longest = {
        key: max(points, key=lambda row: row["num_speculative_tokens"])
        for key, points in grouped(rows, "drafter", "split").items()
    }
    if not longest:
        return None
    figure, axes = new_figure()
    table = []
    for index, ((drafter, split), row) in enumerate(longest.items()):
        values = row["conditional_acceptance"]
        positions = list(range(1, len(values) + 1))
        axes.plot(
            positions,
            [float("nan") if value is None else value for value in values],
            marker=MARKERS[index % len(MARKERS)],
            color=COLOURS[index % len(COLOURS)],
            linestyle=("-", "--", "-.", ":")[index % 4],
            label=f"{DRAFTER_NAMES[drafter]}, {split_label(evaluation, split)}",
        )
        table += [
            [drafter, split, position, value] for position, value in zip(positions, values, strict=True)
        ]
    forced = [row for row in evaluation.get("acceptance_curves") or [] if row["by"] == "block"]
    measure, _, forced = as_served(forced, _serving(evaluation)) if forced else ("greedy", 0.0, [])
    forced = [row for row in forced if row[measure]]
    for index, ((split,), points) in enumerate(grouped(forced, "split").items()):
        axes.plot(
            [int(row["bin"]) for row in points],
            [row[measure]["mean"] for row in points],
            marker=("p", "h")[index % 2],
            color="black",
            markerfacecolor="none",
            linestyle=(0, (1, 3)),
            label=f"teacher-forced, {split_label(evaluation, split)}",
        )
        table += [["teacher-forced", split, int(row["bin"]), row[measure]["mean"]] for row in points]
    axes.set_xlabel("position in the drafted block")
    axes.set_ylabel("accepted, given all before it were")
    axes.set_ylim(0, 1.02)
    axes.set_xticks(range(1, 1 + max(len(row["conditional_acceptance"]) for row in longest.values())))
    return finish(
        figure,
        axes,
        "positions",
        "Acceptance by position in the drafted block",
        ["drafter", "split", "position", "acceptance"],
        table,
    )


def plot_tasks(evaluation: Mapping[str, Any]) -> Plot | None:
    """Acceptance by task and split, in the serving mode's own measure."""
    rows = [row for row in evaluation.get("acceptance") or [] if row["task"] != "all"]
    if not rows:
        return None
    measure, heat, rows = as_served(rows, _serving(evaluation))
    tasks, splits = sorted({row["task"] for row in rows}), sorted({row["split"] for row in rows})
    found = {(row["task"], row["split"]): row.get(measure) for row in rows}
    figure, axes = new_figure(width=1.2 * len(tasks) + 3)
    values = [[found.get((task, split)) for task in tasks] for split in splits]
    labels = [split_label(evaluation, split) for split in splits]
    bars(axes, [literal(task) for task in tasks], values, labels)
    axes.set_ylabel(f"acceptance per token ({measure}, temperature {heat:g})")
    axes.set_ylim(0, 1)
    table = [
        [row["task"], row["split"], *triple(row.get(measure)), row["tokens"], row["samples"]] for row in rows
    ]
    heading = ["task", "split", measure, "low", "high", "tokens", "samples"]
    return finish(figure, axes, "tasks", "Acceptance by task", heading, table)


def plot_curve(evaluation: Mapping[str, Any], by: str) -> Plot | None:
    """Teacher-forced acceptance over the target's entropy ("entropy") or the place in the answer ("answer"),
    by split, in the serving mode's own measure.
    """
    rows = [row for row in evaluation.get("acceptance_curves") or [] if row["by"] == by]
    if not rows:
        return None
    measure, heat, rows = as_served(rows, _serving(evaluation))
    bins = list(
        dict.fromkeys(
            row["bin"] for row in sorted(rows, key=lambda row: float(row["bin"].rstrip("+").split("-")[0]))
        )
    )
    figure, axes = new_figure()
    for index, (split, points) in enumerate(grouped(rows, "split").items()):
        axes.errorbar(
            [bins.index(row["bin"]) for row in points],
            [row[measure]["mean"] for row in points],
            yerr=errors([row[measure] for row in points]),
            marker=MARKERS[index],
            color=COLOURS[index],
            linestyle=("-", "--")[index % 2],
            capsize=3,
            label=split_label(evaluation, split[0]),
        )
    axes.set_xticks(range(len(bins)), bins, fontsize=8)
    words = {"entropy": "entropy of the target's choice (nats)", "answer": "position in the answer (tokens)"}
    axes.set_xlabel(words[by])
    axes.set_ylabel(f"acceptance per token ({measure}, temperature {heat:g})")
    axes.set_ylim(0, 1.02)
    table = [[row["split"], row["bin"], *triple(row[measure]), row["tokens"], row["samples"]] for row in rows]
    heading = ["split", by, measure, "low", "high", "tokens", "samples"]
    title = {
        "entropy": "Acceptance by the target's entropy",
        "answer": "Acceptance by position in the answer",
    }
    return finish(figure, axes, f"acceptance-by-{by}", title[by], heading, table)


def plot_training(history: Sequence[Mapping[str, float]]) -> Plot | None:
    """Loss and held-out acceptance over training: entries hold `step`, and `loss` or the acceptances."""
    names = [name for name in (*MEASURES, "loss") if any(name in entry for entry in history)]
    if not names:
        return None
    figure, axes = new_figure()
    right = axes.twinx() if "loss" in names and len(names) > 1 else None
    for index, name in enumerate(names):
        points = [(entry["step"], entry[name]) for entry in history if name in entry]
        drawn = right if right is not None and name == "loss" else axes
        drawn.plot(
            [step for step, _ in points],
            [value for _, value in points],
            marker=MARKERS[index],
            color=COLOURS[index],
            linestyle=":" if name == "loss" else "-",
            label=name,
        )
    axes.set_xlabel("training step")
    axes.set_ylabel("loss" if names == ["loss"] else "held-out acceptance")
    if right is not None:
        right.set_ylabel("loss")
    table = [[entry.get(name) for name in ("step", *names)] for entry in history]
    return finish(figure, axes, "training", "Training: loss and held-out acceptance", ["step", *names], table)


def _serving(evaluation: Mapping[str, Any]) -> Mapping[str, Any]:
    return evaluation.get("serving") or {}


def _fastest_by_batch(rows: Iterable[Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    found: dict[int, Mapping[str, Any]] = {}
    for row in rows:
        size = row.get("batch_size", 1)
        if size not in found or row["speedup"]["mean"] > found[size]["speedup"]["mean"]:
            found[size] = row
    return dict(sorted(found.items()))
