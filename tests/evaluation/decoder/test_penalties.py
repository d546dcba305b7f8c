"""Each position is penalised by its own prefix, and both models alike."""

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from data.errors import UserError
from evaluation.decoder.penalties import Adjustment, Prefix
from evaluation.decoder.sampling import SamplingOptions

CPU = torch.device("cpu")
TOKENS = torch.tensor([[1, 2, 2, 3, 3, 3, 9, 9], [4, 0, 0, 5, 9, 9, 9, 9]])
PROMPT, POSITION = torch.tensor([3, 2]), torch.tensor([5, 3])  # what follows the position is stale


def prefix() -> Prefix:
    return Prefix.of(TOKENS, PROMPT, POSITION, 10)


def logits(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, 10, generator=torch.Generator().manual_seed(0))


def test_a_prefix_counts_the_answer_and_marks_the_prompt_without_what_is_stale() -> None:
    assert prefix().counts.tolist() == [[0, 0, 0, 3, 0, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 1, 0, 0, 0, 0]]
    assert prefix().prompted.nonzero().tolist() == [[0, 1], [0, 2], [1, 0], [1, 4]]


def test_a_drafted_token_has_the_drafted_tokens_before_it_in_its_prefix() -> None:
    drafted = torch.tensor([[3, 7, 7], [5, 5, 1]])
    along = prefix().along(drafted)
    step = prefix()
    for i in range(4):
        assert torch.equal(along.counts[:, i], step.counts)
        if i < 3:
            step = step.followed_by(drafted[:, i])
    longer = TOKENS.clone()  # the same, read from the text after acceptance
    longer[0, 6:8] = drafted[0, :2]
    assert torch.equal(Prefix.of(longer, PROMPT, POSITION + 2, 10).counts[0], along.counts[0, 2])


def test_repetition_penalty_is_transformers() -> None:
    text = TOKENS[:1, :6]
    ours = Adjustment(SamplingOptions(repetition_penalty=1.7), 10, CPU)(logits(2), prefix())[:1]
    theirs = RepetitionPenaltyLogitsProcessor(1.7)(text, logits(2)[:1].clone())
    assert torch.allclose(ours, theirs)


def test_presence_and_frequency_look_at_the_answer_alone() -> None:
    change = Adjustment(SamplingOptions(presence_penalty=0.5, frequency_penalty=0.25), 10, CPU)
    difference = logits(2) - change(logits(2), prefix())
    assert difference[0].tolist() == pytest.approx([0, 0, 0, 1.25, 0, 0, 0, 0, 0, 0], abs=1e-6)
    assert difference[1].tolist() == pytest.approx([0.75, 0, 0, 0, 0, 0.75, 0, 0, 0, 0], abs=1e-6)


def test_a_reduced_head_is_adjusted_at_its_own_ids() -> None:
    options = SamplingOptions(
        repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2, logit_bias={3: 2.0, 4: -5.0}
    )
    vocab = torch.tensor([0, 3, 4, 9])
    whole = Adjustment(options, 10, CPU)(logits(2), prefix())
    reduced = Adjustment(options, 10, CPU, vocab)(logits(2)[:, vocab], prefix())
    assert torch.equal(whole[:, vocab], reduced)


def test_nothing_asked_for_changes_nothing() -> None:
    given = logits(2)
    assert Adjustment(SamplingOptions(), 10, CPU)(given, None) is given


def test_a_bias_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(UserError, match="id 10"):
        Adjustment(SamplingOptions(logit_bias={10: 1.0}), 10, CPU)
