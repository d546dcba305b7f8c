"""Curves of acceptance against values worked out by hand."""

import numpy as np
import pytest
import torch

from data.records import Samples
from data.signals import Signals
from evaluation.acceptance import AcceptanceTable
from evaluation.acceptance_curves import curves, target_entropy
from tests.evaluation.test_acceptance import record


def table(values: list[float], sample: list[int]) -> AcceptanceTable:
    column = torch.tensor(values)
    return AcceptanceTable(column, column / 2, (column > 0.5).float(), torch.tensor(sample))


def rows(found: list[dict], by: str) -> dict[str, dict]:
    return {row["bin"]: row for row in found if row["by"] == by}


SAMPLES = Samples([record(0, 1, 3), record(1, 1, 2)], None)
# Sample 1 comes first in the table, as teacher forcing orders by length.
TABLE = table([1.0, 0.5, 0.8, 0.6, 0.5], [1, 1, 0, 0, 0])
ENTROPY = [np.array([0.01, 0.3, 3.0]), np.array([0.01, 0.01])]


def test_a_later_position_counts_only_where_all_before_it_were_accepted() -> None:
    found = rows(curves([TABLE], SAMPLES, ENTROPY, 3, seed=0), "block")
    assert found["1"]["sampled"]["mean"] == pytest.approx((0.8 + 0.6 + 0.5 + 1.0 + 0.5) / 5)
    # blocks starting at each token: 0.8 -> 0.6, 0.6 -> 0.5; 1.0 -> 0.5
    second = (0.8 * 0.6 + 0.6 * 0.5 + 1.0 * 0.5) / (0.8 + 0.6 + 1.0)
    assert found["2"]["sampled"]["mean"] == pytest.approx(second)
    assert found["3"]["sampled"]["mean"] == pytest.approx(0.5)
    assert [found[i]["tokens"] for i in "123"] == [5, 3, 1]
    assert found["2"]["greedy"]["mean"] == pytest.approx(1 / 3)
    assert found["1"]["samples"] == 2 and found["3"]["samples"] == 1


def test_bins_hold_the_tokens_of_their_range() -> None:
    found = curves([TABLE], SAMPLES, ENTROPY, 1, seed=0)
    entropy = rows(found, "entropy")
    assert {label: row["tokens"] for label, row in entropy.items()} == {"0-0.05": 3, "0.2-0.5": 1, "2+": 1}
    assert entropy["2+"]["sampled"]["mean"] == pytest.approx(0.5)
    assert entropy["0-0.05"]["argmax"]["mean"] == pytest.approx((0.8 + 1.0 + 0.5) / 3 / 2)
    assert {label: row["tokens"] for label, row in rows(found, "answer").items()} == {"0-4": 5}


def test_entropy_of_known_distributions() -> None:
    head = torch.eye(4)
    hidden = torch.tensor([[0.0, 0.0, 0.0, 0.0], [100.0, 0.0, 0.0, 0.0], [0.0, 0.0, -100.0, -100.0]])
    signals = Signals(hidden, hidden.logsumexp(-1), hidden.argmax(-1))
    (found,) = target_entropy(head, Samples([record(0, 1, 3)], [(signals, 0)]), 1.0)
    assert found == pytest.approx([np.log(4), 0.0, np.log(2)], abs=1e-6)
