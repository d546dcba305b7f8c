"""Requirements are read before any work, and a failing one names what was measured."""

from typing import Any

import pytest

from data.errors import UserError
from distill.gate import parse, unmet
from evaluation.measures import candidate_metrics, is_measure
from tests.evaluation.test_report import evaluation
from tests.evaluation.test_selection import EVALUATION


def failing(*texts: str, **changes: Any) -> list[str]:
    return unmet([parse(text) for text in texts], {**EVALUATION, **changes})


def test_what_holds_passes_and_what_does_not_names_the_measure() -> None:
    assert failing("speedup>=1.5", "speedup < 2", "decode/num_speculative_tokens>=6") == []
    (reason,) = failing("speedup>=1.7", "greedy>0.8")
    assert reason == "speedup>=1.7 is required: it measured 1.6 [1.10, 1.90]."


@pytest.mark.parametrize(
    ("bound", "passes"), [(">=1.6", True), (">1.6", False), ("<=1.6", True), ("<1.6", False)]
)
def test_bounds_are_sharp(bound: str, passes: bool) -> None:
    assert (failing(f"speedup{bound}") == []) is passes


def test_lossless_means_a_certificate_that_holds() -> None:
    assert "there is no certificate" in failing("lossless")[0]
    law = dict.fromkeys(("law_p_value", "plain_p_value", "smallest_leak"), 0.5)
    certificate = {
        "holds": True,
        "reasons": [],
        "sampled": law,
        "self_draft": {"greedy": 1.0, "sampled": 1.0},
    }
    assert failing("lossless", certificate=certificate) == []
    lossy = {**certificate, "holds": False, "reasons": ["2 outputs differ."]}
    assert failing("lossless", certificate=lossy) == ["lossless is required: 2 outputs differ."]


@pytest.mark.parametrize(
    "text", ["speedup", "speedup=1", "speedup>=fast", "speedup>=1..5", "speedup>=.", ">=1", ""]
)
def test_a_requirement_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="write `lossless`"):
        parse(text)


@pytest.mark.parametrize("name", ["speed/speeduq", "nosuch", "acceptance/seen/t0/json", "lossless/held"])
def test_an_unknown_measure_is_refused_before_anything_is_measured(name: str) -> None:
    with pytest.raises(UserError, match="no measure is called") as refused:
        parse(f"{name}>=1")
    assert name != "speed/speeduq" or "near it: speed/speedup" in str(refused.value)


def test_a_measure_that_was_not_taken_is_not_met() -> None:
    (reason,) = failing("speed/seen/tree/k4/speedup>=1")
    assert reason.startswith("speed/seen/tree/k4/speedup>=1 is required: this recipe does not measure it")


def test_every_measure_may_be_required_by_its_name() -> None:
    other = [{**EVALUATION["decode"][0], "batch_size": 4, "ttft_ms_p50": 1.0, "bugs": 0}]
    gap = {"greedy": {"full": 0.5, "gap": {"mean": 0.1}}}
    names = candidate_metrics(
        {
            **EVALUATION,
            **evaluation(decode=EVALUATION["decode"], batches=other, quantization=gap),
            "cost": EVALUATION["cost"],
        }
    )
    assert {"draft/bytes", "speed/first_cost_ratio"} <= set(names)
    assert len(names) > 40 and [name for name in names if not is_measure(name)] == []
