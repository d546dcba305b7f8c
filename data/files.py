"""Files written whole or not at all, and the digests by which stages recognise them."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

from data.errors import UserError

_BLOCK_BYTES = 1 << 20
_FULL = re.compile(r"No space left on device|os error 28|database or disk is full")
_LITTLE_DISK = 1 << 20


def user_path(text: str) -> Path:
    """A path as a user writes it: `~` and `~NAME` are home folders, where there are such."""
    try:
        return Path(text).expanduser()
    except RuntimeError:  # nobody of that name
        return Path(text)


def sha256_file(path: Path) -> str:
    """The sha256 of a file's bytes, as 64 hex digits. `OSError` when it cannot be read."""
    digest = hashlib.sha256()
    with Path(path).open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def write_atomic(path: Path, content: bytes | str) -> None:
    """Write `content` (text as UTF-8, newlines as given) so that a reader sees the old file or the new one.

    The bytes go to a temporary name in the same folder (made when missing), are synced to disk and renamed. A
    failure leaves the old file as it was and no temporary file behind.
    """
    path = Path(path)
    raw = content.encode("utf-8") if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(raw)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.chmod(_usual_mode())  # mkstemp makes files that only their owner can read
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def file_above(path: Path) -> Path | None:
    """What stands where a folder above `path` would have to be, if anything."""
    above = next((folder for folder in path.absolute().parents if folder.exists()), None)
    return None if above is None or above.is_dir() else above


def check_replaceable(path: Path) -> None:
    """`UserError` where `write_atomic` would fail at `path`, or put a file over a folder or a device."""
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is no file: name a new one, or one to replace")
    if (file := file_above(path)) is not None:
        raise UserError(f"{path} cannot be written: {file} is no folder")


def commit_file(temporary: Path, path: Path) -> None:
    """Give a file that a library wrote under a temporary name its own: synced to disk, then renamed."""
    with temporary.open("rb") as stream:
        os.fsync(stream.fileno())
    temporary.chmod(_usual_mode())  # safetensors makes files that only their owner can read
    temporary.replace(path)
    _sync_folder(path.parent)


def replace_directory(directory: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a new folder, sync it and rename it to `directory`; the old one goes only after
    that. Who is killed in between leaves the new folder under its temporary name (`drop_abandoned`).
    """
    directory = Path(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _folder_lock(directory.parent, fcntl.LOCK_SH):
        _replace_directory(directory, write)
    _sync_folder(directory.parent)


def _replace_directory(directory: Path, write: Callable[[Path], object]) -> None:
    temporary = directory.parent / f".{directory.name}.{uuid4().hex[:8]}.tmp"
    temporary.mkdir()
    try:
        write(temporary)
        for file in temporary.rglob("*"):
            if file.is_file():
                file.chmod(_usual_mode())  # safetensors makes files that only their owner can read
        sync_tree(temporary)
        old = directory.parent / f".{directory.name}.{uuid4().hex[:8]}.old"
        if directory.exists():
            directory.replace(old)
        temporary.replace(directory)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def drop_abandoned(folder: Path) -> None:
    """Delete what `replace_directory` left in `folder` under temporary names when its process was killed;
    nothing while any process writes there.
    """
    with _folder_lock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB) as alone:
        if alone:
            for path in (*folder.glob(".*.tmp"), *folder.glob(".*.old")):
                shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _folder_lock(folder: Path, kind: int) -> Iterator[bool]:
    """Hold the kernel's lock (flock) on a folder, which ends with its process however that ends; False where
    others hold it, or where there is no such folder or lock.
    """
    with contextlib.ExitStack() as stack:
        try:
            handle = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, handle)
            fcntl.flock(handle, kind)
        except OSError:
            held = False
        else:
            held = True
        yield held


def sync_tree(directory: Path) -> None:
    """Force everything under `directory` to disk."""
    for path in (*sorted(directory.rglob("*")), directory):
        if path.is_dir():
            _sync_folder(path)
        else:
            with path.open("rb") as stream:
                os.fsync(stream.fileno())


def write_json(path: Path, obj: Any) -> None:
    """Write `obj` as indented JSON with sorted keys, atomically.

    NaN and infinities are not JSON: they raise `ValueError` before anything is written.
    """
    text = json.dumps(obj, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
    write_atomic(path, text + "\n")


def canonical_hash(obj: Any) -> str:
    """The first 16 hex digits of the sha256 of `obj` as canonical JSON.

    Canonical: sorted keys, no blanks, ASCII, so neither the order of a mapping nor the process matters.
    Anything that is not JSON (NaN and mappings with keys other than strings included) is refused.
    """
    _refuse_odd_keys(obj)
    text = json.dumps(obj, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:16]


def _refuse_odd_keys(obj: Any) -> None:
    # json.dumps would turn {1: x} and {"1": x} into the same text, thus two objects into one hash.
    if isinstance(obj, dict):
        for key, value in obj.items():
            if not isinstance(key, str):
                raise TypeError(f"canonical JSON has string keys only, not {key!r}")
            _refuse_odd_keys(value)
    elif isinstance(obj, (list, tuple)):
        for value in obj:
            _refuse_odd_keys(value)


def _usual_mode() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def _sync_folder(folder: Path) -> None:
    # The rename itself is durable only when the folder is synced; some file systems refuse to open folders.
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)


def disk_is_full(error: BaseException, folder: Path) -> bool:
    """Did the work fail for want of disk? Libraries that write by themselves say so in words of their own, if
    at all.
    """
    cause: BaseException | None = error
    while cause is not None:
        if (isinstance(cause, OSError) and cause.errno == errno.ENOSPC) or _FULL.search(str(cause)):
            return True
        cause = cause.__cause__ or cause.__context__
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free < _LITTLE_DISK
