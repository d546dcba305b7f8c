"""Which drafter to serve: rank the candidates (`evaluation.registry`), decide who is champion.

Measurements compare only inside one group (same target, serving mode, data and machine), because a speedup is
a property of all four. The same weights measured again in the same group are a new measurement that replaces
the older one; they are never averaged.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from evaluation.registry import CHAMPION, CandidateRow, read_candidates

if TYPE_CHECKING:
    from mlflow import MlflowClient

NO_CERTIFICATE = "It has no losslessness certificate that holds: evaluate it again, and see its report."


@dataclass(frozen=True)
class Ranked:
    """A row, its place (1 = fastest) in its group, and whether its interval overlaps the leader's."""

    place: int
    row: CandidateRow
    tied: bool
    note: str


@dataclass(frozen=True)
class RankedGroup:
    target: str
    serving: str
    data_digest: str
    machine: str
    rows: tuple[Ranked, ...]


@dataclass(frozen=True)
class Decision:
    """What `select` did, and why."""

    model_id: str
    version: str
    promoted: bool
    reason: str


# Ranking


def newest(rows: Iterable[CandidateRow]) -> list[CandidateRow]:
    """Of several measurements of the same weights in the same group, the newest; order kept otherwise.

    Weights that are champion under one LoggedModel stay champion in a later measurement under another.
    """
    found: dict[tuple[Any, ...], CandidateRow] = {}
    for row in rows:
        key = (row.drafter_digest, *row.group)
        other = found.get(key, row)
        latest = row if row.measured_at >= other.measured_at else other
        found[key] = replace(latest, champion=row.champion or other.champion)
    return list(found.values())


def rank(rows: Iterable[CandidateRow]) -> list[RankedGroup]:
    """Group, drop what a newer measurement replaces, and sort by measured speedup.

    A row is *tied* when its interval overlaps the leader's: the data do not say which of the two is faster.
    Rows without a measured speedup come last, unplaced (place 0).
    """
    groups: dict[tuple[str, str, str, str], list[CandidateRow]] = {}
    for row in newest(rows):
        groups.setdefault(row.group, []).append(row)
    return [RankedGroup(*key, rows=tuple(_ranked(members))) for key, members in sorted(groups.items())]


def _ranked(rows: list[CandidateRow]) -> list[Ranked]:
    measured = sorted((row for row in rows if row.speedup is not None), key=lambda row: -(row.speedup or 0.0))
    found = []
    for place, row in enumerate(measured, start=1):
        tied = place > 1 and _high(row) >= _low(measured[0])
        notes = ["champion"] if row.champion else []
        if tied:
            notes.append("tied with the leader")
        if (row.speedup or 0.0) < 1.0:
            notes.append("slower than plain decoding")
        if row.lossless is not True:
            notes.append("NOT lossless" if row.lossless is False else "no certificate")
        found.append(Ranked(place, row, tied, "; ".join(notes)))
    return found + [Ranked(0, row, False, "speed not measured") for row in rows if row.speedup is None]


def _low(row: CandidateRow) -> float:
    return row.speedup_low if row.speedup_low is not None else -math.inf


def _high(row: CandidateRow) -> float:
    return row.speedup_high if row.speedup_high is not None else math.inf


# Choosing


def select(client: MlflowClient, model_name: str, model_id: str) -> Decision:
    """After a run: does the alias `champion` of `model_name` move to candidate `model_id`? Move it, and say
    why.

    It moves where there is no champion yet, or where the candidate's whole speedup interval lies above the
    champion's speedup in the same group (the champion's newest measurement there). Measurements of
    different groups never move it: that takes measuring both in one run. Raises `ValueError` when the
    candidate is not a READY registered version of `model_name`.
    """
    ours = [row for row in read_candidates(client) if row.name == model_name]
    mine = [row for row in ours if row.model_id == model_id]
    if not mine:
        raise ValueError(f"{model_id} is not a finished candidate of the registered model {model_name}.")
    champion = client.get_registered_model(model_name).aliases.get(CHAMPION)
    digests = {row.drafter_digest for row in ours if row.champion}
    champion_rows = [row for row in ours if row.drafter_digest in digests]
    promoted, reason = _judge(
        newest(mine), newest(champion_rows), None if champion is None else str(champion)
    )
    if promoted:
        client.set_registered_model_alias(model_name, CHAMPION, mine[0].version)
    return Decision(model_id, mine[0].version, promoted, reason)


def _judge(
    mine: Sequence[CandidateRow], champion_rows: Sequence[CandidateRow], champion: str | None
) -> tuple[bool, str]:
    """`champion` is the version that holds the alias; `mine` and `champion_rows` hold one row per group."""
    measured = [row for row in mine if row.speedup is not None]
    if not measured:
        return False, "Its speedup was not measured."
    if bugs := sum(row.bugs for row in mine):
        return False, f"{bugs} of its outputs differ from plain decoding by more than a near tie."
    if not all(row.lossless for row in measured):
        return False, NO_CERTIFICATE
    if champion is None:
        return True, f"It is the first candidate under this name: {_said(measured[0])} over plain decoding."
    if not champion_rows:
        return (
            True,
            f"The champion, version {champion}, is no finished candidate any more: {_said(measured[0])}.",
        )
    if measured[0].drafter_digest == champion_rows[0].drafter_digest:
        return False, f"Its weights are the champion's (version {champion}), measured again."
    for row in measured:
        for other in champion_rows:
            if row.group != other.group or other.speedup is None:
                continue
            if _low(row) > other.speedup:
                return (
                    True,
                    f"{_said(row)} lies above the champion's {other.speedup:.2f}x (version {champion}).",
                )
            return False, (
                f"{_said(row)} does not lie wholly above the champion's {other.speedup:.2f}x "
                f"(version {champion})."
            )
    return False, (
        f"The champion, version {champion}, was measured in another mode, on other data or on another "
        "machine, so the two speedups do not compare."
    )


def _said(row: CandidateRow) -> str:
    return f"a speedup of {row.speedup:.2f}x [{_low(row):.2f}, {_high(row):.2f}]"
