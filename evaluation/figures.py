"""What all plots are drawn with: figures that also read in grey, and their forms as PNG, CSV and SVG.

Series differ by marker, line style or hatch as well as by colour (Okabe and Ito's colour-blind safe palette).
"""

from __future__ import annotations

import csv
import html
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C7B00", "#7A5195"),
    "#999999",
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">")  # as many as five drafters on two splits need
HATCHES = ("", "///", "...", "xxx", "\\\\\\", "++", "oo", "**")


@dataclass(frozen=True)
class Plot:
    """A drawn figure and the numbers in it."""

    name: str
    title: str
    figure: Figure
    heading: tuple[str, ...]
    rows: list[tuple[Any, ...]]

    @property
    def wide(self) -> bool:
        """Does it need the whole width of a page?"""
        return float(self.figure.get_figwidth()) > 8

    def csv(self) -> str:
        """The numbers, with a heading."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([self.heading, *self.rows])
        return text.getvalue()

    def png(self) -> bytes:
        """The picture for MLflow's pages."""
        image = io.BytesIO()
        self.figure.savefig(image, format="png", dpi=120, metadata={"Software": None})
        return image.getvalue()

    def svg(self) -> str:
        """The picture as an SVG element that takes text colour and background from the page around it."""
        import matplotlib

        text = io.StringIO()
        unsaid = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": self.name}):
            self.figure.savefig(text, format="svg", transparent=True, metadata=unsaid)
        drawn = text.getvalue()[text.getvalue().index("<svg") :]
        drawn = re.sub(r"<metadata>.*?</metadata>", "", drawn, flags=re.DOTALL)
        # One page holds many: ids must not meet, and what was black or white follows the page.
        drawn = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{self.name}-", drawn)
        drawn = drawn.replace("#000000", "currentColor").replace("#ffffff", "var(--page)")
        return drawn.replace("<svg", f'<svg role="img" aria-label="{html.escape(self.title)}"', 1)


def literal(text: str) -> str:
    """A label from outside, such that no dollar in it begins a formula."""
    return text.replace("$", r"\$")


def plain_line(axes: Axes) -> None:
    """The line at which speculation is as fast as plain decoding."""
    axes.axhline(1.0, color="black", linewidth=1, linestyle="--")
    axes.annotate("plain decoding", (0.01, 1.0), xycoords=("axes fraction", "data"), va="bottom", fontsize=8)


def triple(value: Mapping[str, float] | None) -> tuple[float | None, float | None, float | None]:
    value = value or {}
    return value.get("mean"), value.get("low"), value.get("high")


def errors(values: Sequence[Mapping[str, float] | None]) -> list[list[float]]:
    """Distances from the mean down and up, for matplotlib; 0 where no interval is known."""
    below, above = [], []
    for value in values:
        mean, low, high = triple(value)
        below.append(max(0.0, mean - low) if mean is not None and low is not None else 0.0)
        above.append(max(0.0, high - mean) if mean is not None and high is not None else 0.0)
    return [below, above]


def grouped(rows: Iterable[Mapping[str, Any]], *keys: str) -> dict[tuple[Any, ...], list[Mapping[str, Any]]]:
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return groups


def bars(
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
            [triple(value)[0] or 0.0 for value in values],
            width,
            yerr=errors(values),
            capsize=2,
            color=COLOURS[index % len(COLOURS)],
            hatch=HATCHES[index % len(HATCHES)],
            edgecolor="white",
            ecolor="black",
            label=names[index],
        )
    axes.set_xticks(range(len(labels)), labels, fontsize=8)


def new_figure(width: float = 7.0) -> tuple[Figure, Axes]:
    # A figure of its own with the Agg canvas: pyplot's global state and displays are left alone.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(min(max(width, 5.0), 16.0), 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    return figure, axes


def finish(
    figure: Figure,
    axes: Axes,
    name: str,
    title: str,
    heading: Sequence[str],
    table: Iterable[Sequence[Any]],
) -> Plot:
    if axes.get_legend_handles_labels()[1]:
        figure.legend(fontsize=8, loc="outside lower center", ncols=2)
    return Plot(name, title, figure, tuple(heading), [tuple(row) for row in table])
