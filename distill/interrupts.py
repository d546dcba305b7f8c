"""SIGINT and SIGTERM: end the work in order, once; a second one ends the process at once. And readers who
leave, at which it ends in silence.

Most work ends where it stands, since what is finished is on disk. Inside `deferred`, where a step must not be
torn, the work is only asked to end, and says so by itself when it can.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM, with the exit code that shells expect."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number
        self.exit_code = 128 + number


_waiting: list[Interrupted] = []
_deferring = 0


@contextlib.contextmanager
def handled() -> Iterator[None]:
    """Raise `Interrupted` at the first signal in here; the second one ends the process at once."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        for each in before:
            signal.signal(each, signal.SIG_DFL)
        if not _deferring:
            raise Interrupted(number)
        _waiting.append(Interrupted(number))

    before: dict[int, Any] = {}
    try:
        for number in (int(signal.SIGINT), int(signal.SIGTERM)):
            before[number] = signal.signal(number, interrupt)
    except ValueError:  # not in the main thread: whoever runs us there minds the signals
        before.clear()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def deferred() -> Iterator[Callable[[], int]]:
    """Hold a signal back until the block ends; the function given tells the number of one that is waiting, 0
    where none is."""
    global _deferring
    _deferring += 1
    try:
        yield lambda: _waiting[0].number if _waiting else 0
    finally:
        _deferring -= 1
        if _waiting and not _deferring:
            first = _waiting[0]
            _waiting.clear()
            raise first


def ask(number: int) -> None:
    """End the `deferred` block as if signal `number` had come here: another process was told."""
    assert _deferring, "there is no block to end"
    if not _waiting:
        _waiting.append(Interrupted(number))


def reader_left() -> bool:
    """Has whoever read our output or messages closed the pipe?"""
    watch = select.poll()
    for stream in (1, 2):
        watch.register(stream, 0)
    return any(event & select.POLLERR for _, event in watch.poll(0))


def fall_silent() -> int:
    """From now on output goes nowhere, what is still buffered too. Returns the exit code that shells expect
    of a command whose reader left.
    """
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    return 128 + signal.SIGPIPE
