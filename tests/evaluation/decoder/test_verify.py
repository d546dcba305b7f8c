"""Losslessness by exact enumeration of the very functions that the engine calls, in float64, with controls
that fail.
"""

import itertools

import pytest
import torch

from evaluation.decoder.verify import accept_probabilities, count_accepted, next_token_probs, verify_greedy

V, K = 3, 2


class ContextModel:
    """A random distribution over V tokens for every context of up to K + 1 tokens."""

    def __init__(self, seed: int, support: list[int] | None = None) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.table = {
            context: self.distribution(generator, support)
            for length in range(K + 1)
            for context in itertools.product(range(V), repeat=length)
        }

    @staticmethod
    def distribution(generator: torch.Generator, support: list[int] | None) -> torch.Tensor:
        probs = torch.rand(V, generator=generator, dtype=torch.float64)
        if support is not None:
            probs *= torch.tensor([float(v in support) for v in range(V)], dtype=torch.float64)
        return probs / probs.sum()


def joint_law(target: ContextModel, draft: ContextModel, next_probs=next_token_probs) -> torch.Tensor:
    """Exact law `[V] * (K + 1)` of the first K + 1 tokens: a round, then plain target draws where it fell
    short.
    """
    law = torch.zeros([V] * (K + 1), dtype=torch.float64)
    for drafted in itertools.product(range(V), repeat=K):
        weight = torch.prod(torch.stack([draft.table[drafted[:i]][drafted[i]] for i in range(K)]))
        if weight == 0:
            continue
        target_probs = torch.stack([target.table[drafted[:i]] for i in range(K + 1)])[None]
        draft_probs = torch.stack([draft.table[drafted[:i]] for i in range(K)])[None]
        accept = accept_probabilities(target_probs, draft_probs, torch.tensor([drafted]))[0]
        for accepted in range(K + 1):
            chance = weight * accept[:accepted].prod()
            if accepted < K:
                chance = chance * (1 - accept[accepted])
            counts = torch.tensor([accepted]), torch.tensor([K])
            following = next_probs(target_probs, draft_probs, *counts)[0]
            for token in range(V):
                add_completions(law, target, (*drafted[:accepted], token), float(chance * following[token]))
    return law


def add_completions(law: torch.Tensor, target: ContextModel, prefix: tuple[int, ...], chance: float) -> None:
    """Spread `chance` over the sequences of K + 1 tokens that the target may continue `prefix` to."""
    if chance == 0:
        return
    if len(prefix) == K + 1:
        law[prefix] += chance
        return
    for token in range(V):
        add_completions(law, target, (*prefix, token), chance * float(target.table[prefix][token]))


def target_law(target: ContextModel) -> torch.Tensor:
    law = torch.zeros([V] * (K + 1), dtype=torch.float64)
    add_completions(law, target, (), 1.0)
    return law


CASES = {
    "independent": (ContextModel(0), ContextModel(1)),
    "equal": (ContextModel(2), ContextModel(2)),
    "disjoint supports": (ContextModel(3, [0]), ContextModel(4, [1, 2])),
    "reduced draft vocabulary": (ContextModel(5), ContextModel(6, [0, 2])),
    "one-hot draft": (ContextModel(7), ContextModel(8, [1])),
}


@pytest.mark.parametrize("name", CASES)
def test_the_joint_law_is_the_targets(name: str) -> None:
    target, draft = CASES[name]
    assert torch.allclose(joint_law(target, draft), target_law(target), atol=1e-12, rtol=0)


def without_residual(target_probs, draft_probs, accepted, proposed):
    return target_probs[0, accepted]


def bonus_from_the_draft(target_probs, draft_probs, accepted, proposed):
    if accepted == proposed:
        return draft_probs[0, accepted - 1]
    return next_token_probs(target_probs, draft_probs, accepted, proposed)


@pytest.mark.parametrize("wrong", [without_residual, bonus_from_the_draft])
def test_a_wrong_rule_changes_the_law(wrong) -> None:
    target, draft = CASES["independent"]
    assert (joint_law(target, draft, wrong) - target_law(target)).abs().max() > 1e-3


def test_acceptance_is_one_minus_the_total_variation_distance() -> None:
    target, draft = ContextModel(0).table[()], ContextModel(1).table[()]
    accept = accept_probabilities(target.expand(V, 2, V), draft.expand(V, 1, V), torch.arange(V)[:, None])[
        :, 0
    ]
    assert torch.allclose((draft * accept).sum(), 1 - 0.5 * (target - draft).abs().sum(), atol=1e-12)


def test_an_empty_residual_falls_back_to_the_target() -> None:
    probs = ContextModel(0).table[()].expand(1, 2, V)
    following = next_token_probs(probs, probs[:, :1], torch.tensor([0]), torch.tensor([1]))
    assert torch.equal(following, probs[:, 0])


def test_fewer_proposals_than_columns_end_with_a_bonus_not_a_residual() -> None:
    target, draft = ContextModel(0), ContextModel(1)
    target_probs = torch.stack([target.table[()], target.table[(0,)], target.table[(0, 1)]])[None]
    draft_probs = torch.stack([draft.table[()], draft.table[(0,)]])[None]
    following = next_token_probs(target_probs, draft_probs, torch.tensor([1]), torch.tensor([1]))
    assert torch.equal(following[0], target.table[(0,)])


def test_accepts_after_the_first_rejection_do_not_count() -> None:
    decisions = torch.tensor([[False, True, True], [True, False, True], [True, True, True]])
    assert count_accepted(decisions, torch.tensor([3, 3, 2])).tolist() == [0, 1, 2]


def test_greedy_keeps_the_prefix_that_the_target_would_have_chosen() -> None:
    target_ids = torch.tensor([[4, 5, 6, 7]])
    assert verify_greedy(target_ids, torch.tensor([[4, 5, 9]]), torch.tensor([3])).tolist() == [2]
    assert verify_greedy(target_ids, torch.tensor([[4, 5, 6]]), torch.tensor([3])).tolist() == [3]
    assert verify_greedy(target_ids, torch.tensor([[9, 5, 6]]), torch.tensor([3])).tolist() == [0]
