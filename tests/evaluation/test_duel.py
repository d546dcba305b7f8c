"""The duel judges by the paired interval of the difference, and measures what it judges."""

from typing import Any

import pytest

from evaluation.decoder.drafters import DraftModel
from evaluation.decoder.engine import Request
from evaluation.duel import difference, duel, judge
from evaluation.evaluate import ServingConfig
from tests.evaluation.decoder.tiny_models import llama
from tests.evaluation.test_speed import output, timing

OUTPUTS = [output([(2, 1)] * 4) for _ in range(6)]


def test_a_difference_is_paired_by_prompt() -> None:
    plain = timing([4.0, 8.0, 2.0, 6.0, 4.0, 1.0], OUTPUTS)
    fast = timing([seconds / 2 for seconds in plain.seconds], OUTPUTS)
    slow = timing([seconds / 1.6 for seconds in plain.seconds], OUTPUTS)
    gap = difference(plain, fast, slow, seed=0)  # prompts differ eightfold, the ratio not at all
    assert gap == pytest.approx({"mean": 0.4, "low": 0.4, "high": 0.4})
    noisy = timing([2.5, 3.0, 1.5, 2.5, 3.0, 0.4], OUTPUTS)
    wide = difference(plain, noisy, slow, seed=0)
    assert wide["low"] < wide["mean"] < wide["high"] and wide["high"] - wide["low"] > 0.1
    assert difference(plain, fast, plain, seed=0)["mean"] == pytest.approx(1.0)


def measured(low: float, high: float, bugs: int = 0) -> dict[str, Any]:
    speed = {"speedup": {"mean": 1.5}, "bugs": bugs}
    gap = {"mean": (low + high) / 2, "low": low, "high": high}
    return {"prompts": 30, "challenger": speed, "champion": {**speed, "bugs": 0}, "difference": gap}


def test_only_an_interval_above_zero_wins() -> None:
    won, reason = judge(measured(0.01, 0.3), "2")
    assert (
        won and "champion's (version 2)" in reason and "[+0.01, +0.30]" in reason and "30 prompts" in reason
    )
    won, reason = judge(measured(-0.1, 0.3), "2")
    assert not won and "includes zero" in reason
    won, reason = judge(measured(-0.3, -0.1), "2")
    assert not won and "lies below zero" in reason
    won, reason = judge(measured(0.2, 0.3), None)
    assert won and "plain decoding's" in reason


def test_a_faster_drafter_with_bugs_does_not_win() -> None:
    won, reason = judge(measured(0.2, 0.3, bugs=2), "2")
    assert not won and reason.startswith("2 of 30 outputs differ")


@pytest.mark.parametrize("names", [("challenger", "champion"), ("challenger",)])
def test_drafters_race_on_the_same_prompts(names: tuple[str, ...]) -> None:
    requests = [Request([1, 2, i], 8) for i in range(3)]
    drafters = {name: DraftModel(llama(9 + i, num_hidden_layers=1)) for i, name in enumerate(names)}
    heard: list[int] = []
    found = duel(
        llama(0), [7], drafters, requests, 3, ServingConfig(), seed=0, on_group=lambda: heard.append(1)
    )
    assert len(heard) == 3 and found["prompts"] == 3
    for name in names:
        assert found[name]["bugs"] == 0 and found[name]["speedup"]["mean"] > 0
    assert ("champion" in found) == (len(names) == 2)
    assert found["difference"]["low"] <= found["difference"]["mean"] <= found["difference"]["high"]
