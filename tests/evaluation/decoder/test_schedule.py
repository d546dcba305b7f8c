"""K by batch size: how often a round drafts, and that the answers are plain decoding's all the same."""

import pytest

from data.errors import UserError
from evaluation.decoder.engine import Request
from evaluation.decoder.schedule import Schedule
from tests.evaluation.decoder.decoders import decoder, tokens
from tests.evaluation.decoder.tiny_models import llama, prompts, relative


def test_a_batch_takes_the_count_of_the_next_larger_size_that_was_measured() -> None:
    schedule = Schedule({4: 3, 1: 8, 16: 0})
    assert [schedule.count(rows) for rows in (1, 2, 4, 5, 16, 99)] == [8, 3, 3, 0, 0, 0]
    assert schedule.most == 8


@pytest.mark.parametrize("by_rows", [{}, {0: 3}, {1: -1}])
def test_impossible_schedules_are_refused(by_rows: dict[int, int]) -> None:
    with pytest.raises(UserError, match="schedule of drafts"):
        Schedule(by_rows)


def test_a_full_batch_does_not_draft_and_its_last_row_does() -> None:
    target, lengths = llama(0), (6, 8, 30)
    asked = [Request(prompt, length) for prompt, length in zip(prompts(3), lengths, strict=True)]
    plain = decoder(target, batch=3, eos=()).generate(asked)
    engine = decoder(target, relative(target), Schedule({1: 4, 2: 2, 3: 0}), batch=3, eos=())
    found = engine.generate(asked)
    assert tokens(found) == tokens(plain)
    first, second, last = ([proposed for proposed, _ in output.rounds] for output in found)
    assert set(first) == {0}  # three rows share every round that it takes part in
    assert second[:5] == [0] * 5 and max(second) <= 2
    assert last[:5] == [0] * 5 and max(last) == 4
    # the control: one number for all drafts from the first round on
    fixed = decoder(target, relative(target), 4, batch=3, eos=()).generate(asked)
    assert tokens(fixed) == tokens(plain) and fixed[2].rounds[0][0] == 4
