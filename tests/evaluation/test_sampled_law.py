"""The test of sampled texts: uniform where the law is the target's, by exact enumeration, and far from it
where it is not.
"""

from itertools import pairwise

import numpy as np
import pytest
import torch

from evaluation.decoder.drafters import DraftModel
from evaluation.decoder.noise import invert
from evaluation.decoder.sampling import SamplingOptions, probabilities
from evaluation.sampled_law import (
    CELLS,
    Scored,
    law_p_value,
    merge,
    places,
    same_law_p_value,
    score,
    smallest_leak,
)
from tests.evaluation.decoder.tiny_models import llama


def distribution(seed: int, size: int = 6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    probs = torch.rand(size, generator=generator, dtype=torch.float64) ** 2
    return probs / probs.sum()


@pytest.mark.parametrize("one_hot", [False, True])
def test_each_outcome_takes_its_own_share_of_the_unit_interval(one_hot: bool) -> None:
    target = distribution(0)
    draft = torch.eye(6, dtype=torch.float64)[2] if one_hot else distribution(1)
    favour = (draft / target)[None]
    zero, one = torch.tensor([0.0, 1.0], dtype=torch.float64)
    ends = torch.stack(
        [
            torch.cat(
                [places(target[None], favour, torch.tensor([token]), noise[None]) for noise in (zero, one)]
            )
            for token in range(6)
        ]
    )
    # ids of equal favour share one stretch; together the stretches tile [0, 1)
    stretches = sorted({(round(float(low), 12), round(float(high), 12)) for low, high in ends})
    assert stretches[0][0] == 0 and stretches[-1][1] == pytest.approx(1)
    for (_, end), (begin, _) in pairwise(stretches):
        assert end == pytest.approx(begin)
    assert len(stretches) == (2 if one_hot else 6)
    most = int(favour.argmax())
    assert ends[most, 0] == 0 and ends[most, 1] == pytest.approx(float(target[most]))


def test_a_token_that_the_target_cannot_say_stands_first() -> None:
    target, draft = torch.tensor([[0.0, 0.5, 0.5]]), torch.tensor([[1.0, 0.0, 0.0]])
    found = places(target, draft / target, torch.tensor([0]), torch.tensor([0.7], dtype=torch.float64))
    assert found.item() == 0


def texts_from(law: str, target: torch.nn.Module, draft: torch.nn.Module, count: int) -> list[list[int]]:
    """Texts of 9 tokens sampled plainly from the target or from the draft, after the prompt [1, 2, 3]."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.tensor([[1, 2, 3]]).repeat(count, 1)
    model = target if law == "target" else draft
    with torch.inference_mode():
        for _ in range(9):
            probs = probabilities(model(tokens).logits[:, -1], SamplingOptions(1.0))
            token = invert(probs, torch.rand(count, generator=generator, dtype=torch.float64))
            tokens = torch.cat((tokens, token[:, None]), 1)
    return tokens[:, 3:].tolist()


@pytest.mark.parametrize("argmax", [False, True])
def test_the_targets_texts_pass_and_the_drafts_fail(argmax: bool) -> None:
    target, draft = llama(0), llama(9)
    results = {}
    for law in ("target", "draft"):
        texts = texts_from(law, target, draft, 200)
        results[law] = score(
            target, DraftModel(draft), [1, 2, 3], texts, SamplingOptions(1.0), argmax=argmax, seed=0
        )
    assert results["target"].pairs().sum() == 200 * 4
    assert law_p_value(results["target"].pairs()) > 0.01
    assert law_p_value(results["draft"].pairs()) < 1e-6
    assert same_law_p_value(results["target"].pairs(), results["draft"].pairs()) < 1e-6
    assert 0.1 < results["target"].distance < 1


def test_a_reduced_draft_vocabulary_and_a_nucleus() -> None:
    target, draft, vocab = llama(0), llama(9), torch.arange(0, 48, 2)
    draft.lm_head.weight = torch.nn.Parameter(draft.lm_head.weight[vocab].detach())
    texts = texts_from("target", target, target, 200)
    drafter = DraftModel(draft, vocab)
    whole = score(target, drafter, [1, 2, 3], texts, SamplingOptions(1.0), argmax=False, seed=0)
    assert law_p_value(whole.pairs()) > 0.01
    nucleus = score(target, drafter, [1, 2, 3], texts, SamplingOptions(1.0, 0.5), argmax=False, seed=0)
    assert law_p_value(nucleus.pairs()) < 1e-6  # these texts were not drawn from the nucleus


def test_p_values_of_equal_laws_are_uniform() -> None:
    generator = np.random.default_rng(0)
    values = [
        same_law_p_value(generator.multinomial(400, [1 / 16] * 16), generator.multinomial(400, [1 / 16] * 16))
        for _ in range(300)
    ]
    assert 0.03 < np.mean(np.array(values) < 0.1) < 0.17


def test_the_smallest_leak_is_found_as_often_as_it_says() -> None:
    shares, pairs, alpha = np.array([0.7, 0.1, 0.1, 0.1]), 500, 0.01
    leak = smallest_leak(shares, pairs, alpha)
    cell = (1 - leak) / CELLS + leak * shares
    generator = np.random.default_rng(0)
    joint = np.outer(cell, cell).reshape(-1)
    found = np.mean([law_p_value(generator.multinomial(pairs, joint)) < alpha for _ in range(400)])
    assert 0.85 < found < 0.95
    assert smallest_leak(shares, 4 * pairs, alpha) < leak
    assert smallest_leak(np.full(4, 0.25), pairs, alpha) == 1.0  # a draft equal to the target leaks unseen


def test_merging_keeps_every_text() -> None:
    one = Scored(torch.rand(2, 4, dtype=torch.float64), torch.rand(2, 4, dtype=torch.float64), 0.2)
    two = Scored(torch.rand(6, 4, dtype=torch.float64), torch.rand(6, 4, dtype=torch.float64), 0.6)
    both = merge([one, two])
    assert (both.pairs() == one.pairs() + two.pairs()).all()
    assert both.distance == pytest.approx(0.5)
