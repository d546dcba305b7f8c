"""Stages: work that is done once, resumed where it stopped, and never read half written.

A stage's outputs stand in runs/<recipe>/<stage>-<key>/. The key is a hash of everything that decides them:
the stage's part of the recipe, the keys of the stages before it, digests of what it reads from outside, and a
schema version. Two files frame the work:

- `inputs.json` is written first: what the key was made from, and the contents of the stages before, so that a
  folder begun on other contents is set aside instead of resumed.
- `manifest.json` is written last by an atomic rename and is the commit mark: the size and sha256 of every
  file.
"""

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from data.errors import UserError
from data.files import canonical_hash, sha256_file, write_json
from distill.identity import environment

SCHEMA = 1
"""Part of every key: raise it when the meaning of outputs changes, and all stages are made again."""
MANIFEST = "manifest.json"
INPUTS = "inputs.json"
SCRATCH = "checkpoints"
"""A folder of this name serves resuming only: it is not part of the outputs and goes when they are
committed.
"""
HASHED_BYTES = 1 << 30
"""Sizes are checked on every run, contents up to this many bytes a stage: a second or two, however large the
run is.
"""

Say = Callable[[str], None]


def runs_folder() -> Path:
    """Where outputs go: runs/ in the current folder, unless the environment variable DISTILL_RUNS names
    another.
    """
    return Path(os.environ.get("DISTILL_RUNS") or "runs").absolute()


@dataclass(frozen=True)
class Stage:
    """One stage of one recipe: what decides its outputs, and the folder that holds them."""

    name: str
    root: Path
    config: Mapping[str, Any]
    outside: Mapping[str, Any]
    upstream: tuple["Stage", ...] = ()

    @property
    def key(self) -> str:
        """16 hex digits that change with anything that decides the outputs."""
        return canonical_hash(self._identity())

    @property
    def directory(self) -> Path:
        """The folder of the outputs, runs/<recipe>/<stage>-<key>."""
        return self.root / f"{self.name}-{self.key}"

    def manifest(self) -> dict[str, Any] | None:
        """The commit mark, or None when there is none or it is not one of this stage."""
        manifest = _read_manifest(self.directory)
        return None if manifest is None or manifest.get("key") != self.key else manifest

    def content(self) -> str:
        """A hash of the committed files; the same key may get other contents where a device is not exact."""
        manifest = self.manifest()
        assert manifest is not None, f"{self.name} is not committed"
        return canonical_hash(manifest["files"])

    def inputs(self) -> dict[str, Any]:
        """What `inputs.json` holds: the parts of the key, and the contents of the stages before."""
        return {**self._identity(), "contents": {stage.name: stage.content() for stage in self.upstream}}

    def siblings(self, besides: Sequence[Sequence[str]]) -> list[Path]:
        """Folders of other finished runs of the stage, of any recipe, whose inputs differ in some places at
        most. Whether their files are still whole is for the reader to check.

        `besides` names the places as keys into `inputs.json`, outermost first.
        """
        wanted = _without(_plain(self.inputs()), besides)
        found = []
        for folder in sorted(self.root.parent.glob(f"*/{self.name}-{'[0-9a-f]' * 16}")):
            inputs = _read_json(folder / INPUTS)
            if folder == self.directory or inputs is None or _read_manifest(folder) is None:
                continue
            if _without(inputs, besides) == wanted:
                found.append(folder)
        return found

    def damage(self) -> list[str]:
        """What is wrong with a committed stage, a sentence per file; empty when nothing is."""
        manifest = self.manifest()
        if manifest is None:
            return [f"{MANIFEST} is missing or unreadable"]
        return _damage(self.directory, manifest["files"])

    def _identity(self) -> dict[str, Any]:
        return {
            "stage": self.name,
            "config": dict(self.config),
            "outside": dict(self.outside),
            "upstream": {stage.name: stage.key for stage in self.upstream},
            "schema": SCHEMA,
        }


@dataclass
class Outcome:
    """What became of a stage in this run."""

    stage: Stage
    seconds: float
    """Time of the session that finished the stage; read from its manifest where the stage was skipped."""
    skipped: bool = False
    resumed: bool = False
    notes: list[str] = field(default_factory=list)


def run_stage(stage: Stage, work: Callable[[Path], None], *, fresh: bool, say: Say) -> Outcome:
    """Bring a stage to its committed state: skip it, resume it, or do it.

    Args:
        stage: its upstream stages must be committed.
        work: fills the folder it is given, and goes on where a folder that it left half done stands;
            `manifest.json` and `inputs.json` are not its business.
        fresh: set aside what is there and begin again.
        say: told in a sentence about anything that a user would not expect.
    """
    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        say(text)

    inputs = _plain(stage.inputs())
    if stage.directory.exists():
        if fresh:
            old = _set_aside(stage.directory)
            note(f"{stage.name}: --fresh, so the earlier outputs now stand in {old.name}")
        elif _read_json(stage.directory / INPUTS) != inputs and _outputs(stage.directory):
            old = _set_aside(stage.directory)
            note(
                f"{stage.name}: begun on other outputs of the stages before it, which now stand in {old.name}"
            )
        elif (manifest := stage.manifest()) is not None:
            damage = stage.damage()
            if not damage:
                return Outcome(stage, manifest["seconds"], skipped=True, notes=notes)
            note(f"{stage.name}: damaged ({'; '.join(damage)}), so that part is made again")
            _drop_damaged(stage)
        elif (stage.directory / MANIFEST).exists():
            note(f"{stage.name}: {MANIFEST} cannot be read, so the stage is done again")
            (stage.directory / MANIFEST).unlink()
    resumed = bool(stage.directory.exists() and _outputs(stage.directory))
    stage.directory.mkdir(parents=True, exist_ok=True)
    write_json(stage.directory / INPUTS, inputs)
    started = time.monotonic()
    work(stage.directory)
    seconds = round(time.monotonic() - started, 3)
    _commit(stage, seconds, resumed)
    return Outcome(stage, seconds, resumed=resumed, notes=notes)


@contextlib.contextmanager
def recipe_lock(root: Path) -> Iterator[bool]:
    """Hold a recipe's folder for this process; tells whether the one before it was killed, or failed.

    Raises `UserError` naming the process that holds it already.

    The lock is the kernel's (flock): it ends with its process however that ends, so none is ever stale.
    """
    root.mkdir(parents=True, exist_ok=True)
    path = root / ".lock"
    with path.open("a+", encoding="utf-8") as stream:
        if other := _taken(stream):
            raise UserError(
                f"recipe {root.name} is already running here (process {other}): wait for it, end it, "
                "or set DISTILL_RUNS to another folder"
            )
        stream.seek(0)
        killed = bool(stream.read().strip())  # who ends well takes its number out
        stream.truncate(0)
        stream.write(str(os.getpid()))
        stream.flush()
        yield killed
        stream.truncate(0)


def holder(root: Path) -> str:
    """The process that holds a recipe's folder; empty where none does."""
    path = root / ".lock"
    if not path.exists():
        return ""
    with path.open("a+", encoding="utf-8") as stream:
        return _taken(stream)


def _taken(stream: TextIO) -> str:
    """Take the lock; where another process has it, that one's number."""
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        stream.seek(0)
        return stream.read().strip() or "unknown"
    return ""


def _commit(stage: Stage, seconds: float, resumed: bool) -> None:
    shutil.rmtree(stage.directory / SCRATCH, ignore_errors=True)
    drop_leftovers(stage.directory)
    files = {
        str(path.relative_to(stage.directory)): {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
        for path in _outputs(stage.directory)
    }
    manifest = {
        "stage": stage.name,
        "key": stage.key,
        "files": files,
        "seconds": seconds,
        "resumed": resumed,  # then the seconds are those of the last session alone
        "environment": environment(),
    }
    write_json(stage.directory / MANIFEST, manifest)


def drop_leftovers(directory: Path) -> None:
    """Delete what sessions that were killed had begun to write under temporary names (`data.files`)."""
    for path in [*directory.rglob("*.tmp"), *directory.rglob(".*.old")]:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _outputs(directory: Path) -> Sequence[Path]:
    framing = {directory / INPUTS, directory / MANIFEST}
    files = [path for path in sorted(directory.rglob("*")) if path.is_file() and path not in framing]
    return [
        path for path in files if not any(part.startswith(".") for part in path.relative_to(directory).parts)
    ]


def _damage(directory: Path, files: Mapping[str, Any]) -> list[str]:
    """What differs from a manifest's `files`, a sentence per file."""
    found, budget = [], HASHED_BYTES
    for name, entry in files.items():
        path = directory / name
        if not path.is_file():
            found.append(f"{name} is missing")
        elif path.stat().st_size != entry["bytes"]:
            found.append(f"{name} has {path.stat().st_size} bytes instead of {entry['bytes']}")
        elif entry["bytes"] <= budget:
            budget -= entry["bytes"]
            if sha256_file(path) != entry["sha256"]:
                found.append(f"{name} has changed since it was written")
    return found


def _drop_damaged(stage: Stage) -> None:
    """Delete the damaged files, and the other files of a damaged shard: only together are they made again."""
    manifest = stage.manifest()
    assert manifest is not None
    # The mark goes first: a crash in between leaves a stage that is not committed, never one that looks
    # whole.
    (stage.directory / MANIFEST).unlink()
    damaged = {
        name for name, entry in manifest["files"].items() if not _is_whole(stage.directory / name, entry)
    }
    shards = {number for name in damaged if (number := _shard_number(name))}
    for name in manifest["files"]:
        if name in damaged or _shard_number(name) in shards:
            (stage.directory / name).unlink(missing_ok=True)


def _is_whole(path: Path, entry: Mapping[str, Any]) -> bool:
    return path.is_file() and path.stat().st_size == entry["bytes"] and sha256_file(path) == entry["sha256"]


def _shard_number(name: str) -> str | None:
    """ "00003" of samples-00003.parquet and signals-00003.safetensors."""
    found = re.search(r"-(\d{5})\.\w+$", name)
    return found[1] if found else None


def _set_aside(directory: Path) -> Path:
    """Rename a folder to <name>.old-<n>; nothing is deleted, since hours may stand in it."""
    number = 1
    while (aside := directory.with_name(f"{directory.name}.old-{number}")).exists():
        number += 1
    directory.rename(aside)
    return aside


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _read_manifest(directory: Path) -> dict[str, Any] | None:
    """The manifest in a folder; None where there is none, or one of another form than `_commit` writes."""
    manifest = _read_json(directory / MANIFEST) or {}
    files, seconds = manifest.get("files"), manifest.get("seconds")
    if not isinstance(files, dict) or not isinstance(seconds, (int, float)):
        return None
    return manifest if all(_is_entry(name, entry) for name, entry in files.items()) else None


def _is_entry(name: str, entry: Any) -> bool:
    """Does it tell of a file inside the folder?"""
    path = Path(name)
    if path.is_absolute() or ".." in path.parts or not isinstance(entry, dict):
        return False
    return isinstance(entry.get("bytes"), int) and isinstance(entry.get("sha256"), str)


def _without(tree: Mapping[str, Any], places: Sequence[Sequence[str]]) -> dict[str, Any]:
    """A copy of nested mappings without what stands at `places`, each a path of keys."""
    kept = dict(tree)
    for first, *rest in places:
        if not rest:
            kept.pop(first, None)
        elif isinstance(kept.get(first), Mapping):
            kept[first] = _without(kept[first], [rest])
    return kept


def _plain(value: Any) -> Any:
    """`value` as it reads back from JSON, so that it compares equal with a file's."""
    return json.loads(json.dumps(value))
