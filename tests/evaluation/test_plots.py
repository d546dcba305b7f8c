"""The plots: which are drawn, that their numbers are the evaluation's, and that they read in grey."""

from __future__ import annotations

import copy
import csv
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
from matplotlib.figure import Figure

from evaluation import figures, plots


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
        for drafter in ("model", "ngram", "adaptive", "before", "tree")
        for split in ("seen", "unseen")
        for k in (6, 4)
    ],
    "best": {"drafter": "model", "num_speculative_tokens": 4, "split": "seen"},
    "acceptance_curves": [
        {
            "split": split,
            "temperature": 0.0,
            "by": by,
            "bin": label,
            "tokens": 50,
            "samples": 5,
            **{name: interval(0.5) for name in ("sampled", "argmax", "greedy")},
        }
        for split in ("seen", "unseen")
        for by, labels in (("block", "123"), ("entropy", ("0-0.05", "2+")), ("answer", ("0-4", "4-8")))
        for label in labels
    ],
    "cost_model": {
        "table": [
            {"batch_size": size, "num_speculative_tokens": k, "speedup": 1.5 - size / 20 if k else 1.0}
            for size in (1, 4, 16)
            for k in range(7)
        ],
        "best": [
            {"batch_size": size, "num_speculative_tokens": k, "speedup": speedup}
            for size, k, speedup in ((1, 4, 1.9), (4, 3, 1.4), (16, 0, 1.0))
        ],
    },
}
NAMES = (
    *("speedup", "batches", "positions", "tasks", "acceptance"),
    *("acceptance-by-entropy", "acceptance-by-answer", "training"),
)
HISTORY = [
    {"step": 0, "sampled": 0.1, "argmax": 0.1, "greedy": 0.1},
    {"step": 50, "loss": 2.0},
    {"step": 100, "sampled": 0.6, "argmax": 0.5, "greedy": 0.7, "loss": 1.0},
]


def read(path: Path) -> list[dict[str, str]]:
    with path.open() as stream:
        return list(csv.DictReader(stream))


def test_acceptance_is_drawn_as_the_drafter_is_served() -> None:
    for serving, measure in (({"temperature": 0.0}, "greedy"), ({"temperature": 0.9}, "sampled")):
        plot = plots.plot_tasks({**EVALUATION, "serving": serving})
        assert plot is not None and measure in plot.csv().splitlines()[0]


def test_every_plot_is_written_with_its_numbers(tmp_path: Path) -> None:
    written = plots.write_plots(EVALUATION, HISTORY, tmp_path / "plots")
    names = {path.name for path in written}
    assert names == {f"{plot}.{kind}" for plot in NAMES for kind in ("png", "csv")}
    for path in written:
        if path.suffix == ".png":
            assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000
    speedup = read(tmp_path / "plots" / "speedup.csv")
    assert len(speedup) == 20 + 7  # five drafters, two splits, two K; and the cost model
    drafters = {"model", "adaptive", "before", "tree", "ngram"}
    assert {row["drafter"] for row in speedup} == drafters | {"cost model"}
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
    assert len(read(tmp_path / "plots" / "positions.csv")) == 5 * 2 * 6 + 2 * 3
    batches = read(tmp_path / "plots" / "batches.csv")
    assert [row["batch_size"] for row in batches if row["drafter"] == "cost model"] == ["1", "4", "16"]
    assert {row["drafter"] for row in batches} == {"cost model", "model", "adaptive"}


def test_what_was_not_measured_is_not_drawn(tmp_path: Path) -> None:
    assert plots.write_plots({}, [], tmp_path) == []
    partial = copy.deepcopy(EVALUATION)
    partial["acceptance_before"] = []
    for name in ("decode", "cost_model", "acceptance_curves"):
        partial[name] = []
    written = plots.write_plots(partial, [{"step": 1, "loss": 1.0}], tmp_path)
    assert {path.stem for path in written} == {"acceptance", "tasks", "training"}


def drawn() -> list[Figure]:
    return [plot.figure for plot in plots.draw_plots(EVALUATION, HISTORY)]


def test_series_differ_without_colour() -> None:
    for figure in drawn():
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


def test_the_speedup_plot_has_the_line_of_plain_decoding() -> None:
    (axes,) = drawn()[0].axes
    flat = [line for line in axes.get_lines() if np.array_equal(line.get_ydata(), [1.0, 1.0])]
    assert len(flat) == 1


def test_errors_never_point_the_wrong_way() -> None:
    assert figures.errors(
        [{"mean": 1.0, "low": 1.2, "high": 0.9}, None, {"mean": 1.0, "low": 0.5, "high": 2.0}]
    ) == [
        [0.0, 0.0, 0.5],
        [0.0, 0.0, 1.0],
    ]


def test_an_svg_follows_the_page_around_it() -> None:
    drawn = {plot.name: plot.svg() for plot in plots.draw_plots(EVALUATION, HISTORY)}
    ids: list[str] = []
    for name, svg in drawn.items():
        element = ElementTree.fromstring(svg)
        assert element.get("role") == "img" and element.get("aria-label")
        assert "#000000" not in svg and "#ffffff" not in svg and "currentColor" in svg
        own = re.findall(r'\bid="([^"]+)"', svg)
        assert all(word.startswith(f"{name}-") for word in own)
        referred = re.findall(r'(?:url\(|href=")#([^")]+)', svg)
        assert set(referred) <= set(own)  # every reference finds its element
        ids += own
        addresses = re.findall(r'"(https?://[^"]+)"', svg)
        assert all(address.startswith("http://www.w3.org/") for address in addresses)  # namespaces only
    assert len(set(ids)) == len(ids)
    assert ">plain decoding<" in drawn["speedup"]  # text stays text
