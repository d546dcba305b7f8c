"""Checkpoints of a training: whole, of this run, and as they were written, or not used."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

from data.files import sha256_file, sync_tree, write_json

_log = logging.getLogger(__name__)

_COMPLETE = "complete.json"  # the last file of a checkpoint


def newest_checkpoint(directory: Path, identity: str) -> Path | None:
    """The newest checkpoint of this run that was written to its end; the other ones, half written or not
    ours, go."""
    whole: dict[int, Path] = {}
    for path in directory.glob("checkpoint-*"):
        if _is_whole(path, identity):
            whole[int(path.name.removeprefix("checkpoint-"))] = path
        else:
            shutil.rmtree(path)
    return whole[max(whole)] if whole else None


def seal(checkpoint: Path, identity: str) -> None:
    """Bring every byte to disk, and then say that the checkpoint is whole, with a checksum of each file."""
    sync_tree(checkpoint)
    written = [path for path in checkpoint.rglob("*") if path.is_file()]
    files = {str(path.relative_to(checkpoint)): sha256_file(path) for path in written}
    write_json(checkpoint / _COMPLETE, {"identity": identity, "files": files})


def _is_whole(checkpoint: Path, identity: str) -> bool:
    """Was it written to its end, by this run, and is every byte as it was written?"""
    try:
        marker = json.loads((checkpoint / _COMPLETE).read_text(encoding="utf-8"))
        ours = marker["identity"] == identity
        changed = [name for name, digest in marker["files"].items() if _digest(checkpoint / name) != digest]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False
    if ours and changed:
        _log.warning("%s is damaged (%s), so an earlier one is used", checkpoint, ", ".join(sorted(changed)))
    return ours and not changed


def _digest(path: Path) -> str:
    return sha256_file(path) if path.is_file() else ""
