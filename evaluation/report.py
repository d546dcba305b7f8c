"""Plots and tables of an evaluation: each plot a PNG with its numbers as CSV beside it.

Every function takes evaluation.json (or the training history) as plain data and a directory. Series differ
by marker, line style or hatch as well as by colour (Okabe and Ito's colour-blind safe palette), so the
plots also read in grey. A plot whose numbers were not measured is not written.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.files import write_atomic
from evaluation.measures import machine_label, serving_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.table import Table

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
HATCHES = ("", "///", "...", "xxx", "\\\\\\", "++", "oo")
MEASURES = ("greedy", "sampled", "argmax")
_DRAFTER_NAMES = {"model": "drafter", "adaptive": "drafter, stops early", "ngram": "n-gram look-up"}


def write_plots(
    evaluation: Mapping[str, Any], history: Sequence[Mapping[str, float]], out_dir: Path
) -> list[Path]:
    """Every plot that the data allow; returns the files written, PNG and CSV."""
    return [
        *plot_speedup(evaluation, out_dir),
        *plot_acceptance(evaluation, out_dir),
        *plot_positions(evaluation, out_dir),
        *plot_tasks(evaluation, out_dir),
        *plot_training(history, out_dir),
    ]


def plot_speedup(evaluation: Mapping[str, Any], out_dir: Path) -> list[Path]:
    """Speedup over K, measured (with intervals) and predicted, for the drafter and n-gram look-up, by
    split.
    """
    rows = [row for row in evaluation.get("decode") or [] if row["drafter"] in _DRAFTER_NAMES]
    series = _grouped(rows, "drafter", "split")
    if not series:
        return []
    figure, axes = _figure()
    table: list[list[Any]] = []
    for index, ((drafter, split), points) in enumerate(series.items()):
        points = sorted(points, key=lambda row: row["num_speculative_tokens"])
        widths = [row["num_speculative_tokens"] for row in points]
        means = [row["speedup"]["mean"] for row in points]
        colour, name = COLOURS[index], f"{_DRAFTER_NAMES[drafter]}, {split} templates"
        axes.errorbar(
            widths,
            means,
            yerr=_errors([row["speedup"] for row in points]),
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
            table.append([drafter, split, row["num_speculative_tokens"], *_triple(row["speedup"]), value])
    axes.axhline(1.0, color="black", linewidth=1, linestyle="--")
    axes.annotate("plain decoding", (0.01, 1.0), xycoords=("axes fraction", "data"), va="bottom", fontsize=8)
    axes.set_xticks(sorted({row["num_speculative_tokens"] for row in rows}))
    axes.set_xlabel("speculative tokens per round (K)")
    axes.set_ylabel("speedup over plain decoding")
    axes.set_title(_subtitle(evaluation), fontsize=9)
    heading = ["drafter", "split", "num_speculative_tokens", "speedup", "low", "high", "predicted"]
    return _save(figure, axes, out_dir, "speedup", heading, table)


def plot_acceptance(evaluation: Mapping[str, Any], out_dir: Path) -> list[Path]:
    """The three acceptances by split and sample temperature, before and after training."""
    bars = {
        when: [row for row in evaluation.get(key) or [] if row["task"] == "all"]
        for when, key in (("before", "acceptance_before"), ("after", "acceptance"))
    }
    groups = sorted({(row["split"], row["temperature"]) for rows in bars.values() for row in rows})
    series = {
        f"{measure}, {when}": {(row["split"], row["temperature"]): row.get(measure) for row in rows}
        for measure in MEASURES
        for when, rows in bars.items()
        if any(row.get(measure) for row in rows)
    }
    if not series:
        return []
    figure, axes = _figure(width=1.2 * len(groups) * len(series) / 2 + 3)
    labels = [f"{split} templates\ntemperature {temperature:g}" for split, temperature in groups]
    _bars(axes, labels, [[values.get(group) for group in groups] for values in series.values()], list(series))
    axes.set_ylabel("acceptance per token")
    axes.set_ylim(0, 1)
    table = [
        [split, temperature, *name.split(", "), *_triple(values.get((split, temperature)))]
        for name, values in series.items()
        for split, temperature in groups
    ]
    heading = ["split", "temperature", "measure", "when", "acceptance", "low", "high"]
    return _save(figure, axes, out_dir, "acceptance", heading, table)


def plot_positions(evaluation: Mapping[str, Any], out_dir: Path) -> list[Path]:
    """Acceptance at each drafted position, given that all before it were accepted, at the largest K
    measured.
    """
    rows = [row for row in evaluation.get("decode") or [] if row.get("conditional_acceptance")]
    longest = {
        key: max(points, key=lambda row: row["num_speculative_tokens"])
        for key, points in _grouped(rows, "drafter", "split").items()
    }
    if not longest:
        return []
    figure, axes = _figure()
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
            label=f"{_DRAFTER_NAMES[drafter]}, {split} templates",
        )
        table += [
            [drafter, split, position, value] for position, value in zip(positions, values, strict=True)
        ]
    axes.set_xlabel("position in the drafted block")
    axes.set_ylabel("accepted, given all before it were")
    axes.set_ylim(0, 1.02)
    axes.set_xticks(range(1, 1 + max(len(row["conditional_acceptance"]) for row in longest.values())))
    return _save(figure, axes, out_dir, "positions", ["drafter", "split", "position", "acceptance"], table)


def plot_tasks(evaluation: Mapping[str, Any], out_dir: Path) -> list[Path]:
    """Acceptance by task and split, at the lowest sample temperature that was measured."""
    rows = [row for row in evaluation.get("acceptance") or [] if row["task"] != "all"]
    if not rows:
        return []
    lowest = min(row["temperature"] for row in rows)
    rows = [row for row in rows if row["temperature"] == lowest]
    measure = "greedy" if lowest == 0 else "sampled"
    tasks, splits = sorted({row["task"] for row in rows}), sorted({row["split"] for row in rows})
    found = {(row["task"], row["split"]): row.get(measure) for row in rows}
    figure, axes = _figure(width=1.2 * len(tasks) + 3)
    values = [[found.get((task, split)) for task in tasks] for split in splits]
    _bars(axes, tasks, values, [f"{split} templates" for split in splits])
    axes.set_ylabel(f"acceptance per token ({measure}, temperature {lowest:g})")
    axes.set_ylim(0, 1)
    table = [
        [row["task"], row["split"], *_triple(row.get(measure)), row["tokens"], row["samples"]] for row in rows
    ]
    heading = ["task", "split", measure, "low", "high", "tokens", "samples"]
    return _save(figure, axes, out_dir, "tasks", heading, table)


def plot_training(history: Sequence[Mapping[str, float]], out_dir: Path) -> list[Path]:
    """Held-out acceptance over training steps; entries hold `step` and any of the acceptances, and maybe
    `loss`.
    """
    names = [name for name in (*MEASURES, "loss") if any(name in entry for entry in history)]
    if not names:
        return []
    figure, axes = _figure()
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
        right.legend(loc="center right", fontsize=8)
    table = [[entry.get(name) for name in ("step", *names)] for entry in history]
    return _save(figure, axes, out_dir, "training", ["step", *names], table)


def results_table(evaluation: Mapping[str, Any]) -> Table:
    """Every decode row as a rich table: what was gained, by drafter, split and K, with sample sizes."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(_subtitle(evaluation)), title_justify="left")
    for heading in ("drafter", "templates"):
        table.add_column(heading)
    for heading in (
        "K",
        "prompts",
        "tokens per call",
        "accepted",
        "same text",
        "tokens/s",
        "plain",
        "speedup",
        "predicted",
    ):
        table.add_column(heading, justify="right")
    best = evaluation.get("best") or {}
    for row in evaluation.get("decode") or []:
        chosen = all(row[key] == best.get(key) for key in ("drafter", "split", "num_speculative_tokens"))
        cells = (
            _DRAFTER_NAMES.get(row["drafter"], row["drafter"]),
            row["split"],
            str(row["num_speculative_tokens"]),
            str(row["prompts"]),
            _said(row.get("tokens_per_target_call")),
            _number(row.get("acceptance_rate")),
            _same_text(row),
            _number(row.get("tokens_per_second"), 1),
            _number(row.get("plain_tokens_per_second"), 1),
            _said(row.get("speedup")),
            _number(row.get("predicted_speedup")),
        )
        table.add_row(*(Text(cell, style="bold" if chosen else "") for cell in cells))
    return table


def _same_text(row: Mapping[str, Any]) -> str:
    """How many outputs are plain decoding's own; those that part at a near tie or by a bug are named."""
    if row.get("identical_outputs") is None:
        return "-"
    named = [
        f"{row[key]} {word}" for key, word in (("near_ties", "near tie"), ("bugs", "BUG")) if row.get(key)
    ]
    return ", ".join([f"{row['identical_outputs']}/{row['prompts']}", *named])


def _subtitle(evaluation: Mapping[str, Any]) -> str:
    return (
        f"{serving_label(evaluation.get('serving') or {})}; {machine_label(evaluation.get('machine') or {})}"
    )


def _said(value: Mapping[str, float] | None) -> str:
    """`2.10 [1.90, 2.30]`, without the interval where there is none."""
    mean, low, high = _triple(value)
    interval = "" if low is None or high is None else f" [{low:.2f}, {high:.2f}]"
    return f"{_number(mean)}{interval}"


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _triple(value: Mapping[str, float] | None) -> tuple[float | None, float | None, float | None]:
    value = value or {}
    return value.get("mean"), value.get("low"), value.get("high")


def _errors(values: Sequence[Mapping[str, float] | None]) -> list[list[float]]:
    """Distances from the mean down and up, for matplotlib; 0 where no interval is known."""
    below, above = [], []
    for value in values:
        mean, low, high = _triple(value)
        below.append(max(0.0, mean - low) if mean is not None and low is not None else 0.0)
        above.append(max(0.0, high - mean) if mean is not None and high is not None else 0.0)
    return [below, above]


def _grouped(rows: Iterable[Mapping[str, Any]], *keys: str) -> dict[tuple[Any, ...], list[Mapping[str, Any]]]:
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return groups


def _bars(
    axes: Axes,
    labels: Sequence[str],
    series: Sequence[Sequence[Mapping[str, float] | None]],
    names: list[str],
) -> None:
    """Grouped bars with error bars: one group per label, one bar per series."""
    width = 0.8 / len(series)
    for index, values in enumerate(series):
        axes.bar(
            [place + (index - (len(series) - 1) / 2) * width for place in range(len(labels))],
            [_triple(value)[0] or 0.0 for value in values],
            width,
            yerr=_errors(values),
            capsize=2,
            color=COLOURS[index % len(COLOURS)],
            hatch=HATCHES[index % len(HATCHES)],
            edgecolor="white",
            ecolor="black",
            label=names[index],
        )
    axes.set_xticks(range(len(labels)), labels, fontsize=8)


def _figure(width: float = 7.0) -> tuple[Figure, Axes]:
    # A figure of its own with the Agg canvas: pyplot's global state and displays are left alone.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(min(max(width, 5.0), 16.0), 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    return figure, axes


def _save(
    figure: Figure,
    axes: Axes,
    out_dir: Path,
    name: str,
    heading: Sequence[str],
    table: Iterable[Sequence[Any]],
) -> list[Path]:
    axes.legend(fontsize=8)
    image, text = io.BytesIO(), io.StringIO()
    figure.savefig(image, format="png", dpi=120, metadata={"Software": None})
    csv.writer(text, lineterminator="\n").writerows([heading, *table])
    paths = [Path(out_dir) / f"{name}.png", Path(out_dir) / f"{name}.csv"]
    write_atomic(paths[0], image.getvalue())
    write_atomic(paths[1], text.getvalue())
    return paths
