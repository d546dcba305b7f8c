"""The verdict follows the interval, the certificate and the cost model; one threshold for all."""

from typing import Any

import pytest

from evaluation.measures import split_label
from evaluation.verdict import pays, standing, verdict, why


def evaluation(mean: float, **changes: Any) -> dict[str, Any]:
    interval = {"mean": mean, "low": mean - 0.1, "high": mean + 0.1}
    row = {
        "drafter": "model",
        "split": "seen",
        "num_speculative_tokens": 4,
        "prompts": 30,
        "tokens_per_second": 20 * mean,
        "plain_tokens_per_second": 20.0,
        "tokens_per_target_call": {"mean": 3.2},
    }
    return {
        "serving": {"batch_size": 1},
        "decode": [row, {**row, "drafter": "adaptive"}],
        "best": {"drafter": "model", "split": "seen", "num_speculative_tokens": 4, "speedup": interval},
        "cost": {"cost_ratio": 0.25, "verify_overhead": {"4": 0.3}},
        **changes,
    }


@pytest.mark.parametrize(
    ("mean", "said", "gain"),
    [
        (2.0, "Serve with K = 4 at batch 1: 2.00x, 95 % interval 1.90-2.10", True),
        (1.05, "No clear gain", False),
        (0.5, "Do not speculate on this machine at batch 1", False),
    ],
)
def test_the_verdict_follows_the_interval(mean: float, said: str, gain: bool) -> None:
    told = evaluation(mean)
    assert verdict(told).startswith(said) and pays(told) is gain
    assert f"20.0 -> {20 * mean:.1f} tokens/s, 30 prompts" in verdict(told)


def test_prompts_without_templates_are_not_said_to_have_any() -> None:
    assert "on known templates with new content" in verdict(evaluation(2.0))
    own = verdict(evaluation(2.0, templates=False))
    assert "on new prompts of the sources it was trained on" in own and "template" not in own
    assert split_label({"templates": False}, "unseen") == "unseen templates", "a shipped set beside them"


def test_a_threshold_counts_as_unclear() -> None:
    assert standing({"low": 1.0, "high": 1.2}) == standing({"low": 0.9, "high": 1.0}) == "unclear"


def test_without_losslessness_speed_does_not_count() -> None:
    lossy = evaluation(2.0, certificate={"holds": False, "reasons": ["3 of 30 outputs differ."]})
    assert verdict(lossy) == "Do not serve: 3 of 30 outputs differ." and not pays(lossy)
    assert pays(evaluation(2.0, certificate={"holds": True, "reasons": []}))


@pytest.mark.parametrize(
    ("stops", "said"), [(9.7, "do not speculate above batch 9"), (None, "expects a gain up to batch 16")]
)
def test_it_says_from_which_batch_size_on_not_to(stops: float | None, said: str) -> None:
    model = {"stops_paying_at": stops, "costs": [{"batch_size": 1}, {"batch_size": 16}]}
    assert said in verdict(evaluation(2.0, cost_model=model))
    assert "batch 9" not in verdict(evaluation(0.5, cost_model=model))


def test_measured_batch_sizes_stand_before_predicted_ones() -> None:
    def measured(size: int, mean: float) -> dict[str, Any]:
        return {
            "batch_size": size,
            "num_speculative_tokens": 3,
            "speedup": {"mean": mean, "low": mean - 0.1, "high": mean + 0.1},
        }

    model = {"stops_paying_at": 9.7, "costs": [{"batch_size": 1}, {"batch_size": 16}]}
    for mean, meaning in ((1.05, "no sure gain"), (0.85, "a loss")):
        told = verdict(evaluation(2.0, cost_model=model, batches=[measured(4, 1.5), measured(16, mean)]))
        assert told.endswith(
            f"; it measured 1.50x with K = 3 at batch 4, {mean:.2f}x with K = 3 at batch 16, {meaning} "
            "there: do not speculate from batch 16 on."
        )
    assert "do not" not in verdict(evaluation(2.0, cost_model=model, batches=[measured(4, 1.5)]))


def test_a_drafter_that_stops_early_is_named_as_such() -> None:
    told = evaluation(2.0)
    told["best"]["drafter"] = "adaptive"
    assert "up to 4 drafts a round" in verdict(told)


def test_why_names_what_the_time_goes_to() -> None:
    assert why(evaluation(0.8)) == (
        "A target call yields 3.20 tokens, a draft step costs 0.25 of a target step, "
        "and checking 4 tokens adds 0.30."
    )
