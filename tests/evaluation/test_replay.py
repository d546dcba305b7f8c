"""Replayed rounds against the decoder's, and an excess that is called a bug."""

import random
from math import prod

import pytest
import torch

from evaluation.acceptance import AcceptanceTable
from evaluation.decoder.engine import Output, States
from evaluation.replay import compare, draft_matches, excess, replay, rounds_by_count
from tests.data.test_records import record


@pytest.mark.parametrize(
    ("matches", "count", "rounds"),
    [
        ("0111111", 2, [2]),  # 1 2 +3 | 4 5 +6, the last left out
        ("1000", 3, [0, 0]),  # +1 | +2 | +3
        ("1101100", 4, [1, 2]),  # 1 +2 | 3 4 +5 | the last left out
        ("1", 4, []),
    ],
)
def test_rounds_follow_from_the_matches(matches: str, count: int, rounds: list[int]) -> None:
    assert replay([matches], count) == rounds


def test_each_draft_of_a_round_has_its_own_matches() -> None:
    assert replay(["0111111", "0000000"], 3) == [1, 1]  # 1 +2 | 3 +4 | the last left out
    assert replay(["0000000", "1111111"], 3) == [0] * 5
    assert replay(["0111111", "0111111"], 3) == replay(["0111111"], 3)


def test_the_first_token_comes_from_the_prefill() -> None:
    assert replay(["00110"], 2) == replay(["10110"], 2)


def test_rounds_of_whole_texts_at_each_number_of_drafts() -> None:
    texts = [["1101100"], ["1000"], ["1"]]  # 6 tokens in 3 rounds, 3 in 3, none
    assert rounds_by_count(texts, [0, 4]) == {
        0: {"tokens_per_target_call": 1.0, "rounds_per_text": 4.5},
        4: {"tokens_per_target_call": 9 / 6, "rounds_per_text": 3.0},
    }


def test_matches_are_certain_where_greedy_and_drawn_with_their_chance_elsewhere() -> None:
    length = 4000
    cold, warm = (
        record([5] * (length + 1), 1, prompt_id=str(temperature), temperature=temperature)
        for temperature in (0.0, 1.0)
    )
    sample = torch.tensor([0] * length + [1] * length)
    greedy = (torch.arange(2 * length) % 2).float()
    table = AcceptanceTable(torch.full((2 * length,), 0.7), torch.full((2 * length,), 0.2), greedy, sample)

    def told(measure: str, temperature: float) -> dict[str, str]:
        found = draft_matches([table], [cold, warm], measure, temperature, seed=0)  # type: ignore[arg-type]
        return {name: each["matches"][0] for name, each in found.items()}

    assert told("greedy", 0.0) == {"0.0": "01" * (length // 2)}
    for measure, chance in (("sampled", 0.7), ("argmax", 0.2)):
        ((name, drawn),) = told(measure, 0.8).items()  # of the samples next to it
        assert name == "1.0" and drawn.count("1") / length == pytest.approx(chance, abs=0.05)


TOLD = {str(i): {"tokens": [1, 2, 3, 4, 5, 6, 7], "matches": ["1101100"]} for i in range(20)}


def outputs(first: int, count: int = 20) -> dict:
    return {str(i): ([1, 2, 3, 4, 5, 6, 7], [(4, first), (3, 2), (0, 0)]) for i in range(count)}


def test_the_same_rounds_are_no_bug() -> None:
    found = compare(TOLD, outputs(1), 4)
    assert found["prompts"] == found["same_rounds"] == 20 and not found["bug"]
    assert found["accepted"] == found["replayed"] == 60


def test_an_excess_is_a_bug_and_a_lack_or_a_few_near_ties_are_not() -> None:
    assert compare(TOLD, outputs(2), 4)["bug"]
    lack = compare(TOLD, outputs(0), 4)
    assert not lack["bug"] and lack["fewer"] == 20
    few = compare(TOLD, {**outputs(1), **outputs(2, 3)}, 4)
    assert few["more"] == 3 and not few["bug"]


def test_another_text_is_not_compared() -> None:
    assert compare(TOLD, {"0": ([1, 2, 9], [(4, 4)]), "x": ([1], [])}, 4)["prompts"] == 0


def sampled(accepted: list[int], expected: float) -> list[Output]:
    """Outputs of one round each with 4 drafts, of which so many stood and `expected` on average."""
    told = {"token": expected - 0.5, "block": expected}
    return [Output([1] * (a + 2), "length", [(4, a)], 0, States(), told) for a in accepted]


def test_accepting_what_the_rule_gives_on_average_is_no_bug() -> None:
    fair = excess(sampled([0, 4, 2, 1, 3] * 8, 2.0))
    assert fair["expected_accepted"] == {"token": 60.0, "block": 80.0}
    assert fair["excess_p_value"] == pytest.approx(0.5) and not fair["excess_bug"]
    assert not excess(sampled([1, 2] * 20, 2.0))["excess_bug"]  # fewer is no excess


def test_accepting_more_than_the_rule_gives_is_a_bug() -> None:
    assert excess(sampled([2, 3, 4] * 10, 2.0))["excess_bug"]
    assert excess(sampled([3] * 10, 2.0))["excess_bug"]
    assert not excess([])["excess_bug"] and not excess(sampled([4], 2.0))["excess_bug"]


@pytest.mark.parametrize("count", [2, 4, 30])
def test_a_fair_decoder_is_seldom_accused_however_few_its_outputs(count: int) -> None:
    chance, runs = random.Random(0), 400

    def fair() -> Output:
        rates = [chance.uniform(0.3, 0.95) for _ in range(4)]
        stood = next((i for i, rate in enumerate(rates) if chance.random() >= rate), 4)
        told = {"block": sum(prod(rates[: i + 1]) for i in range(4))}
        return Output([1] * (stood + 2), "length", [(4, stood)], 0, States(), told)

    # A normal test at .01 accuses a tenth of the decoders with two outputs
    assert sum(excess([fair() for _ in range(count)])["excess_bug"] for _ in range(runs)) <= 3
