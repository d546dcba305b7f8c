"""The plots and the table: which files appear, and that their numbers are the evaluation's."""

from __future__ import annotations

import copy
import csv
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from rich.console import Console

from evaluation import report


def interval(mean: float) -> dict[str, float]:
    return {"mean": mean, "low": mean - 0.1, "high": mean + 0.05}


def acceptance(shift: float) -> list[dict[str, Any]]:
    return [
        {
            "split": split,
            "task": task,
            "temperature": temperature,
            "tokens": 100,
            "samples": 10,
            "sampled": interval(0.6 + shift),
            "argmax": interval(0.5 + shift),
            "greedy": interval(0.7 + shift),
        }
        for split in ("seen", "unseen")
        for task in ("all", "json", "sql")
        for temperature in (0.0, 1.0)
    ]


EVALUATION: dict[str, Any] = {
    "machine": {"cpu": "x86", "cores": 2},
    "serving": {"temperature": 0.0, "batch_size": 1},
    "acceptance": acceptance(0.1),
    "acceptance_before": acceptance(-0.3),
    "decode": [
        {
            "drafter": drafter,
            "split": split,
            "num_speculative_tokens": k,
            "prompts": 30,
            "tokens_per_target_call": interval(3.0),
            "acceptance_rate": 0.8,
            "conditional_acceptance": [0.9] * (k - 1) + [None],
            "tokens_per_second": 50.1,
            "plain_tokens_per_second": 22.0,
            "speedup": interval(2.0 if drafter == "model" else 0.9),
            "predicted_speedup": 1.9 if drafter == "model" else None,
        }
        for drafter in ("model", "ngram", "adaptive")
        for split in ("seen", "unseen")
        for k in (6, 4)
    ],
    "best": {"drafter": "model", "num_speculative_tokens": 4, "split": "seen"},
}
HISTORY = [
    {"step": 0, "sampled": 0.1, "argmax": 0.1, "greedy": 0.1},
    {"step": 50, "loss": 2.0},
    {"step": 100, "sampled": 0.6, "argmax": 0.5, "greedy": 0.7, "loss": 1.0},
]


def read(path: Path) -> list[dict[str, str]]:
    with path.open() as stream:
        return list(csv.DictReader(stream))


def test_every_plot_is_written_with_its_numbers(tmp_path: Path) -> None:
    written = report.write_plots(EVALUATION, HISTORY, tmp_path / "plots")
    names = {path.name for path in written}
    assert names == {
        f"{plot}.{kind}"
        for plot in ("speedup", "acceptance", "positions", "tasks", "training")
        for kind in ("png", "csv")
    }
    for path in written:
        if path.suffix == ".png":
            assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000
    speedup = read(tmp_path / "plots" / "speedup.csv")
    assert len(speedup) == 12  # drafter, stopping early or not, and n-gram; two splits, two K
    assert {row["drafter"] for row in speedup} == {"model", "adaptive", "ngram"}
    assert speedup[0]["num_speculative_tokens"] == "4"
    assert (speedup[0]["speedup"], speedup[0]["low"], speedup[0]["predicted"]) == ("2.0", "1.9", "1.9")
    before = [row for row in read(tmp_path / "plots" / "acceptance.csv") if row["when"] == "before"]
    assert len(before) == 3 * 4
    tasks = read(tmp_path / "plots" / "tasks.csv")
    assert {row["task"] for row in tasks} == {"json", "sql"} and len(tasks) == 4
    assert read(tmp_path / "plots" / "training.csv")[1] == {
        "step": "50",
        "greedy": "",
        "sampled": "",
        "argmax": "",
        "loss": "2.0",
    }
    assert len(read(tmp_path / "plots" / "positions.csv")) == 3 * 2 * 6


def test_what_was_not_measured_is_not_drawn(tmp_path: Path) -> None:
    assert report.write_plots({}, [], tmp_path) == []
    partial = copy.deepcopy(EVALUATION)
    partial["acceptance_before"] = []
    partial["decode"] = []
    written = report.write_plots(partial, [{"step": 1, "loss": 1.0}], tmp_path)
    assert {path.stem for path in written} == {"acceptance", "tasks", "training"}


def drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Figure]:
    figures: list[Figure] = []
    make = report._figure

    def keep(*args: Any, **kwargs: Any) -> Any:
        figure, axes = make(*args, **kwargs)
        figures.append(figure)
        return figure, axes

    monkeypatch.setattr(report, "_figure", keep)
    report.write_plots(EVALUATION, HISTORY, tmp_path)
    return figures


def test_series_differ_without_colour(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for figure in drawn(monkeypatch, tmp_path):
        lines = [line for axes in figure.axes for line in axes.get_lines() if line.get_marker() != "None"]
        styles = [
            (line.get_marker(), line.get_linestyle(), line.get_markerfacecolor() == "none") for line in lines
        ]
        named = [
            style
            for style, line in zip(styles, lines, strict=True)
            if not str(line.get_label()).startswith("_")
        ]
        assert len(set(named)) == len(named)
        hatches = [
            container.patches[0].get_hatch()
            for axes in figure.axes
            for container in axes.containers
            if hasattr(container, "patches") and container.patches
        ]
        assert len(set(hatches)) == len(hatches)


def test_the_speedup_plot_has_the_line_of_plain_decoding(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (axes,) = drawn(monkeypatch, tmp_path)[0].axes
    flat = [line for line in axes.get_lines() if np.array_equal(line.get_ydata(), [1.0, 1.0])]
    assert len(flat) == 1


def test_the_table_holds_every_row_with_interval_and_sample_size() -> None:
    out = io.StringIO()
    Console(file=out, width=180).print(report.results_table(EVALUATION))
    text = out.getvalue()
    assert text.count("n-gram look-up") == 4
    assert "2.00 [1.90, 2.05]" in text
    assert "50.1" in text and "30" in text and "x86, 2 cores" in text
    Console(file=io.StringIO()).print(report.results_table({}))


def test_errors_never_point_the_wrong_way() -> None:
    assert report._errors(
        [{"mean": 1.0, "low": 1.2, "high": 0.9}, None, {"mean": 1.0, "low": 0.5, "high": 2.0}]
    ) == [
        [0.0, 0.0, 0.5],
        [0.0, 0.0, 1.0],
    ]
