"""What is computed from measured times and rounds; no absolute time is asserted."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from evaluation.decoder.drafters import DraftModel, ModelDrafter
from evaluation.decoder.engine import Decoder, Output, Request, States
from evaluation.decoder.rows import Seconds
from evaluation.decoder.runner import Runner
from evaluation.decoder.sampling import SamplingOptions
from evaluation.speed import (
    CHAIN_FROM,
    RAREST_SIBLING,
    Timing,
    drafting,
    latencies,
    measure_costs,
    race,
    sibling_cost,
    sibling_threshold,
    speedup,
    stop_threshold,
    warm_up,
)
from tests.evaluation.decoder.tiny_models import llama


def output(rounds: list[tuple[int, int]], truncated: int = 0) -> Output:
    count = 1 + sum(accepted + 1 for _, accepted in rounds) - truncated
    return Output([1] * count, "length", rounds, truncated, States())


def timing(seconds: list[float], outputs: list[Output]) -> Timing:
    pairs = zip(seconds, outputs, strict=True)
    timed = [replace(item, seconds=Seconds(0.1, spent, spent)) for spent, item in pairs]
    return Timing(timed, Counter(proposed for item in outputs for proposed, _ in item.rounds))


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
    assert result["rounds_by_proposed"] == result["rounds_by_steps"] == [0, 1, 0, 3]
    assert result["rounds_per_text"] == 4
    assert result["tokens_per_target_call"]["mean"] == pytest.approx(9 / 4)


def test_plain_decoding_emits_one_token_per_target_call() -> None:
    result = drafting(timing([1.0], [output([(0, 0)] * 5)]), 1, seed=0)
    assert result["tokens_per_target_call"]["mean"] == 1.0
    assert result["conditional_acceptance"] == [None]


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
    assert timings["plain"].tokens == timings["self"].tokens == [11, 11, 11]
    assert [o.tokens for o in timings["plain"].outputs] == [o.tokens for o in timings["self"].outputs]
    assert len(timings["self"].outputs[0].rounds) < len(timings["plain"].outputs[0].rounds)
    assert all(value > 0 for value in latencies(timings["plain"]).values())
    assert timings["plain"].rounds_by_steps == {0: 33}


def test_a_race_of_batches_is_run_under_steady_load() -> None:
    runner = Runner(llama(0), 3, 64)
    decoders = {"plain": Decoder(runner, eos_ids=[], options=SamplingOptions())}
    asked = [Request([1, 2, number], length) for number, length in enumerate((4, 9, 5, 20))]
    timings = race(decoders, [asked], lambda: None)["plain"]
    assert timings.tokens == [3, 8, 4, 19]
    for output in timings.outputs:  # three rows shared each round of every answer, the last one's too
        assert output.seconds.share == pytest.approx(output.seconds.decode / 3)
    assert sum(timings.seconds) < decoders["plain"].decode_seconds  # the rest is the repeats'
    decoders["plain"].generate(asked)
    drained = decoders["plain"].generate(asked)
    assert drained[3].seconds.share > 1.5 * drained[3].seconds.decode / 3
    assert sum(o.seconds.share for o in drained) == pytest.approx(decoders["plain"].decode_seconds)


@pytest.mark.parametrize(("captured", "runs"), [(False, [(8, False)]), (True, [(20, True), (20, True)])])
def test_captured_rounds_are_warmed_up_whole_and_twice(captured: bool, runs: list[tuple[int, bool]]) -> None:
    made: list[tuple[int, bool]] = []

    def generate(group: list[Request], keep_full: bool = False) -> None:
        made.append((group[0].max_new_tokens, keep_full))

    decoder: Any = SimpleNamespace(graphs=object() if captured else None, generate=generate)
    warm_up(decoder, [Request([1, 2], 20)])
    assert made == runs


def test_latencies_are_those_of_answers() -> None:
    timed = timing([2.0, 9.0], [output([(0, 0)] * 4), output([(0, 0)] * 9)])
    assert latencies(timed) == pytest.approx(
        {"ttft_ms_p50": 100, "ttft_ms_p95": 100, "tpot_ms_p50": 750, "tpot_ms_p95": 975}
    )


def test_costs_are_measured_for_every_width() -> None:
    runner = Runner(llama(0), 1, 192)
    drafter = ModelDrafter(DraftModel(llama(1, num_hidden_layers=1)), runner, SamplingOptions())
    costs = measure_costs(runner, drafter, range(1, 5), batch_size=1)
    assert set(costs["verify_overhead"]) == {"1", "2", "3", "4"}
    assert costs["draft_reading_ms"] > 0 and costs["batch_size"] == 1
    assert costs["cost_ratio"] == pytest.approx(costs["draft_step_ms"] / costs["target_step_ms"])
