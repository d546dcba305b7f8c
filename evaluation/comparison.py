"""Candidates side by side, as tables and as plain data: what `distill compare` shows of a ranking."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from evaluation.selection import RankedGroup
from evaluation.tables import TextTable, number

if TYPE_CHECKING:
    from rich.table import Table


def candidate_table(group: RankedGroup) -> TextTable:
    """The candidates of one group, fastest first."""
    rows: list[tuple[str, ...]] = []
    for ranked in group.rows:
        row = ranked.row
        interval = f" [{row.speedup_low:.2f}, {row.speedup_high:.2f}]" if row.speedup_low is not None else ""
        rows.append(
            (
                str(ranked.place or "-"),
                row.label,
                row.kind,
                row.loss,
                row.layers,
                "-" if row.tokens is None else f"{row.tokens:,}",
                " / ".join(number(value, 3) for value in (row.greedy, row.sampled, row.argmax)),
                ("up to " if row.stops_early else "") + number(row.num_speculative_tokens, 0),
                number(row.tokens_per_target_call),
                "-" if row.speedup is None else f"{row.speedup:.2f}x{interval}",
                number(row.cost_ratio, 3),
                ranked.note,
            )
        )
    heading = (
        *("", "candidate", "kind", "loss", "layers", "tokens", "greedy / sampled / argmax"),
        *("K", "tokens per call", "speedup", "cost ratio", "note"),
    )
    title = f"{group.target}, {group.serving}; data {group.data_digest or 'unknown'}; {group.machine}"
    return TextTable(title, heading, 5, rows)


def kinds_table(group: RankedGroup) -> TextTable:
    """What drafters of several kinds cost and bring, fastest first."""
    rows: list[tuple[str, ...]] = []
    for ranked in group.rows:
        row = ranked.row
        rows.append(
            (
                row.label,
                row.kind,
                " ".join(f"{value:.2f}" for value in row.by_position) or "-",
                number(row.tokens_per_target_call),
                number(row.first_cost_ratio, 3),
                number(row.cost_ratio, 3),
                number(row.training_minutes, 1),
                "-" if row.drafter_bytes is None else f"{row.drafter_bytes / 1e6:.1f}",
                ", ".join(
                    f"{at.batch_size}: {at.speedup:.2f}x{'' if at.measured else ' predicted'}"
                    for at in row.by_batch
                )
                or "-",
            )
        )
    heading = (
        *("candidate", "kind", "accepted by position", "tokens per call", "first draft", "further drafts"),
        *("training minutes", "MB", "speedup at other batch sizes"),
    )
    title = "What they bring and cost; a draft step in target steps, the weights beside the target's"
    return TextTable(title, heading, 3, rows)


def render(groups: Sequence[RankedGroup]) -> Table:
    """The comparison for the terminal: one block per group."""
    from rich.table import Table

    page = Table.grid(padding=(0, 0, 1, 0))
    for group in groups:
        page.add_row(candidate_table(group).rich())
        page.add_row(kinds_table(group).rich())
    return page


def to_json(groups: Sequence[RankedGroup]) -> dict[str, Any]:
    """The comparison as plain data, for `--json`."""
    return {"groups": [asdict(group) for group in groups]}
