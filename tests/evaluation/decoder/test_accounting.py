import pytest

from evaluation.decoder.accounting import Account

ROUNDS = [(3, 3), (3, 1), (3, 0), (1, 1), (0, 0)]


def test_counts_and_rates_of_a_row() -> None:
    account = Account.of(ROUNDS, emitted=10, truncated=1, expected={"token": 4.5})
    account.check()
    assert (account.rounds, account.drafted, account.accepted) == (5, 10, 5)
    assert (account.offered, account.reached, account.stood) == ([4, 3, 3], [4, 2, 1], [3, 1, 1])
    assert account.conditional_acceptance == [3 / 4, 1 / 2, 1.0]
    assert account.unconditional_acceptance == [3 / 4, 1 / 3, 1 / 3]


def test_a_total_is_the_sum_of_its_rows() -> None:
    rows = [Account.of(ROUNDS, 11, 0, {"token": 4.5}), Account.of([(5, 2), (0, 0)], 5, 0, {"token": 1.0})]
    total = Account.total(rows)
    total.check()
    both = Account.of([*ROUNDS, (5, 2), (0, 0)], 16, 0, {"token": 5.5})
    assert total == Account(**{**vars(both), "rows": 2})
    assert Account.total([]) == Account()


@pytest.mark.parametrize(("emitted", "truncated"), [(11, 1), (10, 0), (12, 0)])
def test_a_token_that_is_not_accounted_for_is_an_error(emitted: int, truncated: int) -> None:
    with pytest.raises(AssertionError, match="accounted for"):
        Account.of(ROUNDS, emitted, truncated).check()


def test_no_rate_where_nothing_was_reached() -> None:
    assert Account.of([(2, 0)], 2, 0).conditional_acceptance == [0.0, None]
