"""Bad input, from the command line down: each case is refused with one clear message, exit code 2 and no
traceback, and what stood in the runs folder before stands there afterwards.

A case is what is wrong, and the words that must be said: what, where, and what to do. Everything runs in this
process, on random tiny models.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from distill import cli
from distill.context import Run

MOST_LINES = 6
"""Of a message: a sentence, or a heading with a line for each problem."""


class Untracked:
    """A tracker that keeps nothing: MLflow is not what is tested here."""

    offline = False

    @contextmanager
    def stage(self, name: str) -> Iterator[Untracked]:
        yield self

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One runs folder for all cases, with a finished stage that no case may touch."""
    folder = tmp_path_factory.mktemp("runs")
    kept = folder / "mine" / "sample-0123456789abcdef"
    kept.mkdir(parents=True)
    (kept / "samples-00000.parquet").write_bytes(b"hours of work")
    (kept / "manifest.json").write_text("{}")
    return folder


@pytest.fixture(autouse=True)
def _quick(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTILL_RUNS", str(runs))
    monkeypatch.setattr(Run, "tracker", Untracked())


@pytest.fixture
def refused(runs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command that must be refused; its message."""

    def refused(*words: str) -> str:
        before = contents(runs / "mine")
        code = cli.main(list(words))
        out, err = capfd.readouterr()
        message = err[err.rindex("recipe mine") if "recipe mine" in err else 0 :].strip()
        assert code == 2, err
        assert out == "" and "Traceback" not in err
        last = message.splitlines()[-MOST_LINES:]
        assert all(len(line) < 700 for line in last), "a wall of text is no message"
        after = contents(runs / "mine")
        assert {name: after.get(name) for name in before} == before, "something was lost"
        return message

    return refused


def contents(folder: Path) -> dict[str, str]:
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.glob("sample-0123456789abcdef/*")
    }
