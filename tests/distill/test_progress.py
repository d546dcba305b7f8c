"""Progress lines: how far, how fast, how long still."""

import pytest

from distill import progress
from distill.progress import LINE_SECONDS, Progress


def lines(capfd: pytest.CaptureFixture[str]) -> list[str]:
    return capfd.readouterr().err.splitlines()


def test_what_an_earlier_session_did_is_no_part_of_the_rate(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with Progress("train", 10_000) as shown:
        for done in (5_000, 5_100, 5_300):
            now[0] += LINE_SECONDS / 2
            shown.to(done, note="loss 1.0")
        now[0] += LINE_SECONDS / 2
        shown.to(5_400)
        now[0] += LINE_SECONDS
        shown.advance(400)
    assert lines(capfd) == [
        "train: 5,300 of 10,000 tokens; 15 tokens/s, 5.2 minutes left; loss 1.0",
        "train: 5,800 of 10,000 tokens; 16.7 tokens/s, 4.2 minutes left",
        "train: 5,800 of 10,000 tokens; done",
    ]
