"""What the guard lets a drafter cost, and that it lets a good one be."""

import pytest

from data.errors import UserError
from evaluation.decoder.guard import DEBT, LONGEST_PAUSE, PROBE_DEBT, Guard

COSTS = [1.0, 1.4, 1.7, 2.0]


def spent(guard: Guard, emitted: float, rounds: int) -> tuple[float, int]:
    """Target steps that `rounds` rounds of a drafter lose, and how many of them draft."""
    lost, drafting = 0.0, 0
    for _ in range(rounds):
        width = 3 if guard.drafts else 0
        tokens = emitted if width else 1.0
        lost += COSTS[width] - tokens
        drafting += width > 0
        guard.record(width, 0, tokens)
    return lost, drafting


def test_a_drafter_that_never_hits_costs_a_bounded_debt_and_rare_trials() -> None:
    lost, drafting = spent(Guard(COSTS), 1.0, 1000)
    assert DEBT < lost < 0.05 * 1000
    assert drafting > DEBT  # tried again now and then
    fresh = Guard(COSTS)
    assert spent(fresh, 1.0, 5)[1] == 5 and not fresh.drafts


def test_trials_grow_rarer_but_go_on() -> None:
    guard = Guard(COSTS)
    spent(guard, 1.0, 5000)
    _, drafting = spent(guard, 1.0, 10 * LONGEST_PAUSE)
    assert 8 <= drafting <= 2 * 11 * (PROBE_DEBT + 1)


def test_a_drafter_that_pays_is_never_paused() -> None:
    assert spent(Guard(COSTS), 2.5, 1000)[1] == 1000


def test_a_drafter_that_gets_good_is_taken_back_and_one_that_turns_bad_is_caught_soon() -> None:
    guard = Guard(COSTS)
    spent(guard, 1.0, 200)
    assert spent(guard, 3.0, 1000)[1] > 800
    spent(guard, 4.0, 500)
    lost, _ = spent(guard, 1.0, 500)
    assert lost < 2 * DEBT + 0.05 * 500


def test_rounds_without_drafts_neither_earn_nor_lose() -> None:
    guard = Guard(COSTS)
    for _ in range(100):
        guard.record(0, 0, 1.0)
    assert guard.drafts and guard.balance == DEBT


@pytest.mark.parametrize("costs", [[], [2.0, 3.0], [1.0, -1.0]])
def test_impossible_costs_are_refused(costs: list[float]) -> None:
    with pytest.raises(UserError):
        Guard(costs)
