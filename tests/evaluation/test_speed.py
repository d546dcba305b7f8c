"""What is computed from measured times and rounds; no absolute time is asserted."""

import pytest

from evaluation.decoder.drafters import DraftModel, ModelDrafter
from evaluation.decoder.engine import Decoder, Output, Request, States
from evaluation.decoder.runner import Runner
from evaluation.decoder.sampling import SamplingOptions
from evaluation.speed import (
    CHAIN_FROM,
    RAREST_SIBLING,
    Timing,
    drafting,
    latencies,
    measure_costs,
    predict_speedup,
    race,
    sibling_cost,
    sibling_threshold,
    speedup,
    stop_threshold,
)
from tests.evaluation.decoder.tiny_models import llama


def output(rounds: list[tuple[int, int]], truncated: int = 0) -> Output:
    count = 1 + sum(accepted + 1 for _, accepted in rounds) - truncated
    return Output([1] * count, "length", rounds, truncated, States())


def timing(seconds: list[float], outputs: list[Output]) -> Timing:
    return Timing([0.1] * len(seconds), seconds, [[item] for item in outputs])


def test_speedup_is_the_ratio_of_seconds_for_the_same_tokens() -> None:
    outputs = [output([(2, 1)] * 4), output([(2, 1)] * 2)]
    result = speedup(timing([4.0, 2.0], outputs), timing([2.0, 1.0], outputs), seed=0)
    assert result == {"mean": 2.0, "low": 2.0, "high": 2.0}
    uneven = speedup(timing([4.0, 2.0], outputs), timing([1.0, 2.0], outputs), seed=0)
    assert uneven["mean"] == pytest.approx(2.0) and uneven["low"] < 2 < uneven["high"]


def test_speedup_of_unequal_tokens_compares_seconds_per_token() -> None:
    plain, longer = [output([(0, 0)] * 4)], [output([(1, 1)] * 4)]
    assert speedup(timing([4.0], plain), timing([4.0], longer), seed=0)["mean"] == pytest.approx(2.0)


def test_acceptance_by_position_counts_only_what_was_reached() -> None:
    result = drafting(timing([1.0], [output([(3, 3), (3, 1), (3, 0), (1, 1)])]), 3, seed=0)
    assert result["conditional_acceptance"] == [3 / 4, 1 / 2, 1.0]
    assert result["unconditional_acceptance"] == [3 / 4, 1 / 3, 1 / 3]
    assert result["acceptance_rate"] == 5 / 10
    assert result["rounds_by_proposed"] == [0, 1, 0, 3]
    assert result["tokens_per_target_call"]["mean"] == pytest.approx(9 / 4)


def test_plain_decoding_emits_one_token_per_target_call() -> None:
    result = drafting(timing([1.0], [output([(0, 0)] * 5)]), 1, seed=0)
    assert result["tokens_per_target_call"]["mean"] == 1.0
    assert result["conditional_acceptance"] == [None]


def test_the_prediction_follows_the_cost_model() -> None:
    costs = {
        "target_step_ms": 10.0, "draft_step_ms": 1.0, "first_draft_step_ms": 2.0, "cost_ratio": 0.1,
        "verify_overhead": {"1": 0.1, "2": 0.2, "3": 0.4, "4": 0.5},
    }  # fmt: skip
    only_four = [0, 0, 0, 0, 7]
    assert predict_speedup(4.0, costs, only_four) == pytest.approx(4 / (1 + 0.2 + 3 * 0.1 + 0.5))
    assert predict_speedup(4.0, costs, only_four, cost_ratio=0.05) == pytest.approx(4 / (1 + 4 * 0.05 + 0.5))
    mixed = [1, 0, 1, 0, 2]  # a round without drafts costs one target step
    cost = (1 + (1 + 0.2 + 0.1 + 0.2) + 2 * (1 + 0.2 + 0.3 + 0.5)) / 4
    assert predict_speedup(3.0, costs, mixed) == pytest.approx(3 / cost)
    beside = 6 * 0.4 / 3 / 4  # a column costs most, on average, where the forward is 3 wide
    assert predict_speedup(3.0, costs, mixed, siblings=6) == pytest.approx(3 / (cost + beside))


def test_drafting_on_pays_less_the_dearer_a_draft_is() -> None:
    cheap = {"cost_ratio": 0.05, "verify_overhead": {"1": 0.05, "4": 0.2}}
    dear = {"cost_ratio": 0.2, "verify_overhead": {"1": 0.1, "4": 0.4}}
    assert stop_threshold(cheap) == pytest.approx(1.5 * (0.05 + 0.05))
    assert stop_threshold(cheap) < stop_threshold(dear) < 1


def test_a_sibling_needs_no_draft_step_and_a_dear_column_leaves_a_chain() -> None:
    costs = {"cost_ratio": 0.2, "verify_overhead": {"1": 0.05, "2": 0.2, "4": 0.3}}
    assert sibling_cost(costs) == pytest.approx(0.1)
    assert sibling_threshold(costs) == pytest.approx(0.15)
    assert sibling_threshold(costs) < stop_threshold(costs)
    free = {"cost_ratio": 0.2, "verify_overhead": {"1": 0.0, "2": -0.01}}
    assert sibling_threshold(free) == RAREST_SIBLING
    assert sibling_threshold({**costs, "verify_overhead": {"4": 2.0}}) > CHAIN_FROM


def test_a_race_times_the_same_work_for_everyone() -> None:
    runner = Runner(llama(0), 1, 64)
    options = SamplingOptions()
    drafter = ModelDrafter(DraftModel(llama(0)), runner, options)
    decoders = {
        "plain": Decoder(runner, eos_ids=[], options=options),
        "self": Decoder(runner, eos_ids=[], options=options, drafter=drafter, num_speculative_tokens=3),
    }
    heard: list[int] = []
    groups = [[Request([1, 2, i], 12)] for i in range(3)]
    timings = race(decoders, groups, lambda: heard.append(1))
    assert len(heard) == 3
    assert timings["plain"].decoded_tokens == timings["self"].decoded_tokens == [11, 11, 11]
    assert [g[0].tokens for g in timings["plain"].outputs] == [g[0].tokens for g in timings["self"].outputs]
    assert len(timings["self"].outputs[0][0].rounds) < len(timings["plain"].outputs[0][0].rounds)
    assert all(value > 0 for value in latencies(timings["plain"]).values())


def test_costs_are_measured_for_every_width() -> None:
    runner = Runner(llama(0), 1, 192)
    drafter = ModelDrafter(DraftModel(llama(1, num_hidden_layers=1)), runner, SamplingOptions())
    costs = measure_costs(runner, drafter, range(1, 5), batch_size=1)
    assert set(costs["verify_overhead"]) == {"1", "2", "3", "4"}
    assert costs["cost_ratio"] == pytest.approx(costs["draft_step_ms"] / costs["target_step_ms"])
