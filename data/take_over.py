"""Shards of earlier samplings that hold what a new one plans: they are linked instead of sampled again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from data.files import commit_file
from data.records import read_records, shard_fault, shard_path, signals_path
from data.sample import PlannedSample
from data.sample_summary import quarantine_path


def take_over(shards: Iterable[Sequence[PlannedSample]], elsewhere: Sequence[Path], directory: Path) -> int:
    """Link into `directory` each planned shard that it lacks and that one of the folders `elsewhere` holds;
    how many.

    The folders must be of samplings that answer a planned sample alike: of the same target, sampled alike.
    How many prompts they hold out and how far they went may differ.
    """
    taken = 0
    for index, shard in enumerate(shards):
        if shard_path(directory, index).exists():
            continue
        there = (shard_path(folder, index) for folder in elsewhere)
        if (found := next((path for path in there if _holds(path, shard)), None)) is not None:
            _link(found, directory)
            taken += 1
    return taken


def _holds(path: Path, shard: Sequence[PlannedSample]) -> bool:
    """Does the file hold the planned samples, all of them that its engine could give?"""
    if not path.exists() or shard_fault(path):
        return False
    quarantine = quarantine_path(path)
    try:
        lines = quarantine.read_text(encoding="utf-8").splitlines() if quarantine.exists() else []
        failed = {json.loads(line)["id"] for line in lines}
    except (OSError, ValueError, KeyError, TypeError):  # damaged: what it was about is not known
        return False
    planned = [each for each in shard if each.request.id not in failed]
    return [(each.prompt.id, each.sample_index, each.temperature) for each in planned] == [
        (record.prompt_id, record.sample_index, record.temperature) for record in read_records(path)
    ]


def _link(shard: Path, directory: Path) -> None:
    """A shard is whole once its records are there, so they come last."""
    directory.mkdir(parents=True, exist_ok=True)
    for path in (quarantine_path(shard), signals_path(shard), shard):
        (directory / path.name).unlink(missing_ok=True)
        if path.exists():
            _link_or_copy(path, directory / path.name)


def _link_or_copy(path: Path, to: Path) -> None:
    """Folders may stand on different disks, belong to others, or know no links."""
    try:
        to.hardlink_to(path.resolve())
    except OSError:
        temporary = to.with_name(f"{to.name}.tmp")
        shutil.copyfile(path, temporary)
        commit_file(temporary, to)
