import pytest
import torch

from data.errors import UserError
from distill.vocab import choose_draft_vocab

COUNTS = torch.tensor([0, 5, 9, 5, 0, 1, 5, 0])


def test_the_most_frequent_ids_and_the_special_ones_in_ascending_order() -> None:
    assert choose_draft_vocab(COUNTS, 4, [7]).tolist() == [1, 2, 3, 7]
    assert choose_draft_vocab(COUNTS, 4, [7]).dtype == torch.int64


def test_ties_go_to_the_lowest_id() -> None:
    assert choose_draft_vocab(COUNTS, 2, []).tolist() == [1, 2]
    assert choose_draft_vocab(COUNTS, 3, []).tolist() == [1, 2, 3]
    assert choose_draft_vocab(torch.zeros(6, dtype=torch.int64), 3, [5]).tolist() == [0, 1, 5]


def test_counts_are_left_alone() -> None:
    counts = COUNTS.clone()
    choose_draft_vocab(counts, 3, [0])
    assert counts.tolist() == COUNTS.tolist()


def test_the_full_size_keeps_all() -> None:
    assert choose_draft_vocab(COUNTS, 8, [0, 7]).tolist() == list(range(8))


@pytest.mark.parametrize(("size", "always", "words"), [(9, [], "only 8 ids"), (1, [0, 7], "2 special ids")])
def test_sizes_that_cannot_be(size: int, always: list[int], words: str) -> None:
    with pytest.raises(UserError, match=words):
        choose_draft_vocab(COUNTS, size, always)
