"""A `distill` command in a fork of this process, counted as it writes and struck at one of its writes."""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


@dataclass
class Session:
    """How one run of the command ended."""

    status: int
    """Exit code; minus the number of the signal that ended it."""
    writes: int
    seconds: float
    log: str


@dataclass
class Writes:
    """Counts this process's writes under `folder`, and strikes just before the one with number `at`."""

    folder: str
    at: int | None
    strike: Callable[[], None]
    count: int = 0

    def install(self) -> None:
        """From here on; there is no way back, so in a process of its own."""
        from sqlalchemy import event
        from sqlalchemy.engine import Engine

        sys.addaudithook(self.hear)
        event.listen(Engine, "commit", lambda connection: self.tick())
        fsync = os.fsync

        def counted(handle: int) -> None:
            self.tick()
            fsync(handle)

        os.fsync = counted

    def hear(self, name: str, args: tuple[Any, ...]) -> None:
        """Python tells of what it is about to do (PEP 578)."""
        if name == "open":
            if isinstance(args[0], (str, bytes, os.PathLike)) and args[2] & _WRITING:
                self.look(args[0])
        elif name in ("os.rename", "os.link"):
            self.look(args[1])
        elif name in ("os.remove", "os.rmdir", "os.mkdir", "os.truncate"):
            self.look(args[0])

    def look(self, path: Any) -> None:
        if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(self.folder):
            self.tick()

    def tick(self) -> None:
        self.count += 1
        if self.count - 1 == self.at:
            self.strike()


def run(
    words: Sequence[str],
    runs: Path,
    *,
    at: int | None = None,
    strike: str = "kill",
    after: float | None = None,
) -> Session:
    """Run `distill WORDS` in a fork: struck before its write number `at`, or killed `after` seconds."""
    log = runs.parent / "log.txt"
    reading, writing = os.pipe()
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        _work(list(words), runs, log, writing, at, strike)
    os.close(writing)
    if after is not None:
        time.sleep(after)
        os.kill(child, signal.SIGKILL)  # it is not waited for yet, so its number is its own
    _, status = os.waitpid(child, 0)
    with os.fdopen(reading) as stream:
        told = stream.read()
    code = os.waitstatus_to_exitcode(status)
    return Session(code, int(told or 0), time.monotonic() - started, log.read_text(errors="replace"))


def _work(words: list[str], runs: Path, log: Path, writing: int, at: int | None, strike: str) -> None:
    code = 70
    try:
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        os.environ["DISTILL_RUNS"] = str(runs)
        from distill import cli

        writes = Writes(str(runs), at, lambda: STRIKES[strike](os.getpid()))
        writes.install()
        code = cli.main(words)
        os.write(writing, str(writes.count).encode())
    finally:
        os._exit(code)


def _twice(process: int) -> None:
    try:
        os.kill(process, signal.SIGTERM)
        time.sleep(0.01)  # here the handler raises, where the work may end at once
    finally:
        os.kill(process, signal.SIGTERM)


def _full(process: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


STRIKES: dict[str, Callable[[int], None]] = {
    "kill": lambda process: os.kill(process, signal.SIGKILL),
    "term": lambda process: os.kill(process, signal.SIGTERM),
    "int": lambda process: os.kill(process, signal.SIGINT),
    "twice": _twice,
    "full": _full,
}
ENDINGS: dict[str, set[int]] = {
    "kill": {-signal.SIGKILL},
    "time": {-signal.SIGKILL, 0},
    "term": {143},
    "int": {130},
    "twice": {-signal.SIGTERM},
    "full": {2, 0},
}
