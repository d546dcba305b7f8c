"""The cost model against closed forms; no time is asserted."""

import pytest

from evaluation.contestants import guard
from evaluation.cost_model import (
    best_count,
    break_even_acceptance,
    chain_or_tree,
    measure_by_batch,
    predict,
    predict_speedup,
    reading_cost,
    round_cost,
    stops_paying_at,
    time_shares,
)
from evaluation.decoder.drafters import DraftModel
from evaluation.speed import node_prices
from tests.evaluation.decoder.tiny_models import llama

COSTS = {
    "target_step_ms": 10.0,
    "draft_step_ms": 1.0,
    "first_draft_step_ms": 2.0,
    "cost_ratio": 0.1,
    "verify_overhead": {"2": 0.2, "4": 0.6},
    "batch_size": 1,
    "draft_reading_ms": 5.0,
}
FORETOLD = {
    count: {
        "tokens_per_target_call": sum(0.7**i for i in range(count + 1)),
        "rounds_per_text": 20 / (count + 1),
    }
    for count in range(5)
}


def test_the_cost_of_a_round_in_target_steps() -> None:
    assert round_cost(COSTS, 0) == 1.0
    assert round_cost(COSTS, 2) == pytest.approx(1 + 0.2 + 0.1 + 0.2)
    assert round_cost(COSTS, 3) == pytest.approx(1 + 0.2 + 0.2 + 0.4)  # halfway between measured widths
    assert round_cost(COSTS, 1) == pytest.approx(1 + 0.2 + 0.1)
    assert round_cost(COSTS, 2, 0.05) == pytest.approx(1 + 2 * 0.05 + 0.2)
    assert round_cost(COSTS, 2, 0.0) == pytest.approx(1 + 0.2)


def test_reading_a_prompt_holds_up_the_whole_batch() -> None:
    assert reading_cost(COSTS) == pytest.approx(0.5)
    assert reading_cost({**COSTS, "batch_size": 4}) == pytest.approx(2.0)
    plain = predict_speedup(3.0, COSTS, [0, 0, 7])
    read = predict_speedup(3.0, COSTS, [0, 0, 7], rounds_per_text=10)
    assert 3 / read == pytest.approx(3 / plain + 0.05)
    assert predict_speedup(1.0, COSTS, [7], rounds_per_text=10, cost_ratio=0.0) == 1.0  # a look-up's


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
    wider = (1 * (0.5 - 0.2) + 2 * (0.5 - 0.5)) / 4  # two siblings in each round that drafts, to 4 at most
    assert predict_speedup(3.0, costs, mixed, columns_beside=6) == pytest.approx(3 / (cost + wider))
    assert node_prices(costs) == pytest.approx([0, 0.15, 0.3, 0.6, 0.75])
    watch = guard(costs, 2)
    assert watch.costs == pytest.approx([1, 1.3, 1.5]) and watch.cost(2, 1) == pytest.approx(1.7)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_at_the_break_even_acceptance_nothing_is_gained_or_lost(count: int) -> None:
    rate = break_even_acceptance(COSTS, count)
    assert rate is not None
    assert sum(rate**i for i in range(count + 1)) == pytest.approx(round_cost(COSTS, count))


def test_where_even_full_acceptance_does_not_pay_there_is_no_break_even() -> None:
    assert break_even_acceptance({**COSTS, "cost_ratio": 5.0}, 2) is None
    free = {**COSTS, "cost_ratio": 0.0, "first_draft_step_ms": 0.0, "verify_overhead": {"2": 0.0}}
    assert break_even_acceptance(free, 2) == 0.0


def test_the_best_k_falls_to_none_as_batches_grow() -> None:
    dear = {**COSTS, "batch_size": 16, "verify_overhead": {"2": 3.0, "4": 6.0}}
    found = predict([COSTS, dear], FORETOLD, {})
    assert [(row["batch_size"], row["speculate"]) for row in found["best"]] == [(1, True), (16, False)]
    assert found["best"][1]["num_speculative_tokens"] == 0 and found["best"][1]["speedup"] == 1.0
    assert [row["chain"] for row in found["best"]] == [False, True]  # a column costs .15 and 1.5 steps
    sentence = chain_or_tree(found["best"])
    assert f"likely as {found['best'][0]['sibling_above']:.2f} at batch 1;" in sentence and sentence.endswith(
        "any tree at batch 16."
    )
    assert chain_or_tree(found["best"][1:]).startswith("A chain is better")
    assert len(found["table"]) == 2 * 5
    assert best_count(found["table"], 16) == 1  # what to race there all the same
    halved = predict([COSTS, dear], FORETOLD, {1: 0.5})
    assert halved["best"][1]["speedup"] == 1.0
    assert halved["best"][0]["speedup"] == pytest.approx(found["best"][0]["speedup"] / 2)
    assert 1 < found["stops_paying_at"] <= 16


def test_the_crossing_lies_between_two_batch_sizes_on_a_log_scale() -> None:
    def best(*speedups: float) -> list[dict[str, float]]:
        return [{"batch_size": 4**i, "speedup": value} for i, value in enumerate(speedups)]

    assert stops_paying_at(best(1.5, 0.5)) == pytest.approx(2.0)
    assert stops_paying_at(best(1.5, 1.25, 0.75)) == pytest.approx(8.0)
    assert stops_paying_at(best(1.5, 1.2)) is None
    assert stops_paying_at(best(0.9, 0.8)) == 1.0


def test_time_shares_add_up_and_follow_the_rounds() -> None:
    shares = time_shares(COSTS, [1, 0, 3], 4.0)
    total = 4 + (3 * 0.3 + 0.5) + 3 * 0.2
    assert shares == pytest.approx(
        {"target_step": 4 / total, "drafting": 1.4 / total, "wider_check": 0.6 / total}
    )


def test_costs_are_measured_for_every_batch_size() -> None:
    found = measure_by_batch(llama(0), DraftModel(llama(1, num_hidden_layers=1)), [2, 3], [1, 4])
    assert [costs["batch_size"] for costs in found] == [1, 4]
    for costs in found:
        assert set(costs["verify_overhead"]) == {"2", "3"} and costs["target_step_ms"] > 0
