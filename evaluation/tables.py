"""The tables of an evaluation as plain text cells, for the terminal and for the page."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evaluation.measures import machine_label, serving_label

if TYPE_CHECKING:
    from rich.table import Table

DRAFTER_NAMES = {
    "model": "drafter",
    "adaptive": "drafter, stops early",
    "tree": "drafter, chain with siblings",
    "before": "before training, stops early",
    "ngram": "n-gram look-up",
}


@dataclass(frozen=True)
class TextTable:
    """Cells by row. The first `words` columns are words, the others numbers."""

    title: str
    heading: tuple[str, ...]
    words: int
    rows: list[tuple[str, ...]]
    chosen: int | None = None
    """The row to stress."""

    def csv(self) -> str:
        """The cells, with a heading."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([self.heading, *self.rows])
        return text.getvalue()

    def rich(self) -> Table:
        """For the terminal."""
        from rich.table import Table
        from rich.text import Text

        table = Table(title=Text(self.title), title_justify="left")
        for index, heading in enumerate(self.heading):
            table.add_column(heading, justify="left" if index < self.words else "right")
        for index, row in enumerate(self.rows):
            style = "bold" if index == self.chosen else ""
            table.add_row(
                *(Text(cell, style=style) for cell in row)
            )  # Text: a name with brackets is no markup
        return table


def draw_tables(evaluation: Mapping[str, Any]) -> dict[str, TextTable]:
    """Every table that the data allow, by its heading, in the order of the page."""
    tables = {"Speed": decode_table(evaluation), "Latency": latency_table(evaluation)}
    return tables | ({"Cost model": cost_table(evaluation)} if evaluation.get("cost_model") else {})


def decode_table(evaluation: Mapping[str, Any]) -> TextTable:
    """Every decode row: what was gained, by drafter, split and K, with sample sizes."""
    best = evaluation.get("best") or {}
    rows: list[tuple[str, ...]] = []
    chosen = None
    for row in [*(evaluation.get("decode") or []), *(evaluation.get("batches") or [])]:
        keys = ("drafter", "split", "num_speculative_tokens")
        if chosen is None and all(row[key] == best.get(key) for key in keys):
            chosen = len(rows)
        up_to = "up to " if row["drafter"] in ("adaptive", "tree", "before") else ""
        rows.append(
            (
                DRAFTER_NAMES.get(row["drafter"], row["drafter"]),
                row["split"],
                str(row.get("batch_size", 1)),
                f"{up_to}{row['num_speculative_tokens']}",
                str(row["prompts"]),
                said(row.get("tokens_per_target_call")),
                number(row.get("acceptance_rate")),
                _same_text(row),
                number(row.get("tokens_per_second"), 1),
                number(row.get("plain_tokens_per_second"), 1),
                said(row.get("speedup")),
                number(row.get("predicted_speedup")),
            )
        )
    heading = (
        *("drafter", split_heading(evaluation), "batch", "K", "prompts", "tokens per call", "accepted"),
        *("same text", "tokens/s", "plain", "speedup", "predicted"),
    )
    return TextTable(subtitle(evaluation), heading, 2, rows, chosen)


def latency_table(evaluation: Mapping[str, Any]) -> TextTable:
    """Milliseconds to the first token (TTFT) and per token after it (TPOT), over K and batch size."""
    rows: list[tuple[str, ...]] = []
    for split, plain in ((evaluation.get("plain") or {}).get("latency") or {}).items():
        if plain:
            batch = str((evaluation.get("serving") or {}).get("batch_size", 1))
            rows.append(("plain decoding", split, batch, "0", *_latencies(plain)))
    for row in [*(evaluation.get("decode") or []), *(evaluation.get("batches") or [])]:
        cells = (
            DRAFTER_NAMES.get(row["drafter"], row["drafter"]),
            row["split"],
            str(row.get("batch_size", 1)),
            str(row["num_speculative_tokens"]),
        )
        rows.append((*cells, *_latencies(row)))
    ranks = ("TTFT p50", "TTFT p95", "TPOT p50", "TPOT p95")
    heading = ("decoder", split_heading(evaluation), "batch", "K", *ranks)
    return TextTable("Milliseconds of an answer, waiting for its turn left out", heading, 2, rows)


def split_heading(evaluation: Mapping[str, Any]) -> str:
    """Over a column of "seen" and "unseen": what was seen, templates where the prompts have them."""
    return "templates" if evaluation.get("templates", True) else "sources"


def subtitle(evaluation: Mapping[str, Any]) -> str:
    """What was measured and where: serving mode and machine."""
    serving, machine = evaluation.get("serving") or {}, evaluation.get("machine") or {}
    return f"{serving_label(serving)}; {machine_label(machine)}"


def _latencies(row: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(
        number(row.get(f"{name}_ms_{rank}"), 1) for name in ("ttft", "tpot") for rank in ("p50", "p95")
    )


def cost_table(evaluation: Mapping[str, Any]) -> TextTable:
    """The cost model: predicted speedup for every batch size and K, beside the measured one where there is
    one; the best K of a batch size is marked.
    """
    model = evaluation.get("cost_model") or {"table": [], "best": []}
    split = (evaluation.get("best") or {}).get("split")
    measured = {
        (row.get("batch_size", 1), row["num_speculative_tokens"]): row["speedup"]
        for row in [*(evaluation.get("decode") or []), *(evaluation.get("batches") or [])]
        if row["drafter"] == "model" and row["split"] == split
    }
    best = {(row["batch_size"], row["num_speculative_tokens"]) for row in model["best"]}
    rows: list[tuple[str, ...]] = []
    for row in model["table"]:
        place = (row["batch_size"], row["num_speculative_tokens"])
        even = row["break_even_acceptance"]
        rows.append(
            (
                str(place[0]),
                f"{place[1]}{' (best)' if place in best else ''}",
                number(row["tokens_per_target_call"]),
                number(row["round_cost"]),
                number(row["speedup"]),
                said(measured.get(place)),
                "-" if place not in measured else f"{row['speedup'] / measured[place]['mean'] - 1:+.0%}",
                "-" if place[1] == 0 else "never" if even is None else f"{even:.2f}",
            )
        )
    heading = (
        *("batch", "K", "tokens per call", "cost of a round", "predicted", "measured", "off by"),
        "break-even acceptance",
    )
    return TextTable("Predicted and measured speedup; costs in target steps", heading, 0, rows)


def _same_text(row: Mapping[str, Any]) -> str:
    """How many outputs are plain decoding's own; those that part at a near tie or by a bug are named."""
    if row.get("identical_outputs") is None:
        return "-"
    named = [
        f"{row[key]} {word}" for key, word in (("near_ties", "near tie"), ("bugs", "BUG")) if row.get(key)
    ]
    return ", ".join([f"{row['identical_outputs']}/{row['prompts']}", *named])


def said(value: Mapping[str, float] | None) -> str:
    """`2.10 [1.90, 2.30]`, without the interval where there is none."""
    value = value or {}
    low, high = value.get("low"), value.get("high")
    interval = "" if low is None or high is None else f" [{low:.2f}, {high:.2f}]"
    return f"{number(value.get('mean'))}{interval}"


def number(value: float | None, digits: int = 2) -> str:
    """A number with so many digits, `-` for none."""
    return "-" if value is None else f"{value:.{digits}f}"
