"""Losses against float64 closed forms: point masses, reduced and padded vocabularies, and trl."""

import math
from typing import get_args

import pytest
import torch
from torch import Tensor

from distill.loss_config import LossConfig, LossName, WarmStart
from distill.losses import (
    argmax,
    cross_entropy,
    divergence,
    forward_kl,
    jsd,
    lk_hybrid,
    neg_log_acceptance,
    reverse_kl,
    tvd,
    tvd_pp,
)

DIVERGENCES = [name for name in get_args(LossName) if name != "cross_entropy"]


def random_distributions(rows: int = 5, ids: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(rows, ids, generator=generator, dtype=torch.float64)
    target = torch.randn(rows, ids, generator=generator, dtype=torch.float64).log_softmax(-1)
    return logits.requires_grad_(), target


def test_forward_kl_value_and_gradient() -> None:
    logits, target = random_distributions()
    loss = forward_kl(logits, target)
    expected = torch.nn.functional.kl_div(
        logits.log_softmax(-1), target, reduction="none", log_target=True
    ).sum(-1)
    torch.testing.assert_close(loss, expected)
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    torch.testing.assert_close(gradient, logits.softmax(-1) - target.exp())


def test_forward_kl_of_a_reduced_vocabulary_is_weighted_with_its_mass() -> None:
    logits, full = random_distributions(ids=7)
    logits = logits.detach()[:, :4].requires_grad_()
    target = full[:, :4]
    mass = target.exp().sum(-1, keepdim=True)
    renormalised = target - mass.log()
    loss = forward_kl(logits, target)
    torch.testing.assert_close(loss, mass.squeeze(-1) * forward_kl(logits, renormalised))
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    torch.testing.assert_close(gradient, mass * logits.softmax(-1) - target.exp())
    assert not torch.allclose(gradient, logits.softmax(-1) - renormalised.exp())


def test_tvd_value_and_gradient() -> None:
    logits, target = random_distributions()
    draft, probs = logits.softmax(-1), target.exp()
    loss = tvd(logits, target)
    torch.testing.assert_close(loss, (draft - probs).abs().sum(-1) / 2)
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    below = (draft < probs).double()
    share = (draft * below).sum(-1, keepdim=True)
    torch.testing.assert_close(gradient, -draft * (below - share))


def test_tvd_counts_uncovered_mass_as_rejected() -> None:
    target = torch.tensor([[0.3, 0.2]], dtype=torch.float64).log()  # 0.5 lies outside the draft vocabulary
    assert tvd(torch.tensor([[0.0, math.log(2 / 3)]], dtype=torch.float64), target).item() == pytest.approx(
        0.5
    )


def test_lk_hybrid_mixes_by_the_mean_acceptance() -> None:
    logits, target = random_distributions()
    distance = tvd(logits, target)
    weight = math.exp(-3 * (1 - distance.mean().item()))
    expected = weight * forward_kl(logits, target) + (1 - weight) * distance
    torch.testing.assert_close(lk_hybrid(logits, target), expected)
    torch.testing.assert_close(lk_hybrid(logits, target, eta=0), forward_kl(logits, target))


def test_cross_entropy_skips_uncovered_tokens() -> None:
    logits, _ = random_distributions(rows=2)
    loss = cross_entropy(logits, torch.tensor([4, -1]))
    assert loss.tolist() == [pytest.approx(-logits.log_softmax(-1)[0, 4].item()), 0.0]
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    assert gradient[1].abs().max() == 0 and gradient[0].abs().max() > 0


def reduced(rows: int = 6, ids: int = 9, kept: int = 5) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits over the first `kept` ids, the target's true log-probabilities of those, and both distributions
    over all ids: q is 0 outside."""
    logits, target = random_distributions(rows, ids)
    logits = logits.detach()[:, :kept].requires_grad_()
    draft = torch.cat((logits.detach().softmax(-1), torch.zeros(rows, ids - kept, dtype=torch.float64)), -1)
    return logits, target[:, :kept], draft, target.exp()


def kl(one: Tensor, other: Tensor) -> Tensor:
    """KL(one || other) over all ids, written out."""
    return torch.where(one > 0, one * (one.log() - other.log()), 0.0).sum(-1)


def gradient_of(name: LossName, logits: Tensor, target: Tensor) -> Tensor:
    return torch.autograd.grad(divergence(name)(logits, target).sum(), logits)[0]


def test_reverse_kl_value_and_gradient() -> None:
    logits, target, draft, probs = reduced()
    loss = reverse_kl(logits, target)
    torch.testing.assert_close(loss, kl(draft, probs))
    assert (loss >= -target.exp().sum(-1).log()).all()
    q = logits.softmax(-1)
    expected = q * (q.log() - target - loss.detach().unsqueeze(-1))
    torch.testing.assert_close(gradient_of("reverse_kl", logits, target), expected)


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.8])
def test_jsd_value_and_gradient(beta: float) -> None:
    logits, target, draft, probs = reduced()
    mix = beta * probs + (1 - beta) * draft
    loss = jsd(logits, target, beta)
    torch.testing.assert_close(loss, beta * kl(probs, mix) + (1 - beta) * kl(draft, mix))
    q = logits.softmax(-1)
    log_ratio = (q / (beta * target.exp() + (1 - beta) * q)).log()
    expected = (1 - beta) * q * (log_ratio - (q * log_ratio).sum(-1, keepdim=True))
    torch.testing.assert_close(torch.autograd.grad(loss.sum(), logits)[0], expected)


def test_jsd_tends_to_the_two_kls_and_bounds_acceptance() -> None:
    logits, target = random_distributions()
    near = 1e-6
    torch.testing.assert_close(
        jsd(logits, target, near) / near, forward_kl(logits, target), rtol=1e-4, atol=0
    )
    torch.testing.assert_close(
        jsd(logits, target, 1 - near) / near, reverse_kl(logits, target), rtol=1e-4, atol=0
    )
    assert (tvd(logits, target) <= (2 * jsd(logits, target)).sqrt()).all()


def test_tvd_pp_has_the_value_of_tvd_and_a_normalised_advantage() -> None:
    logits, target, draft, probs = reduced()
    torch.testing.assert_close(tvd_pp(logits, target), (probs - draft).clamp(min=0).sum(-1))
    q = logits.softmax(-1)
    reward = (q < target.exp()).double()
    mean = (q * reward).sum(-1, keepdim=True)
    advantage = (reward - mean) / (q * (reward - mean) ** 2).sum(-1, keepdim=True).sqrt()
    found = gradient_of("tvd_pp", logits, target)
    torch.testing.assert_close(found, -q * advantage)
    assert not torch.allclose(found, gradient_of("tvd", logits, target))


def test_tvd_pp_still_pulls_where_tvd_does_not() -> None:
    logits = torch.tensor([[20.0, 0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    target = torch.tensor([[0.01, 0.98, 0.01]], dtype=torch.float64).log()
    assert gradient_of("tvd", logits, target).abs().max() < 1e-8
    assert gradient_of("tvd_pp", logits, target).abs().max() > 1e-5


def test_neg_log_acceptance_value_and_gradient() -> None:
    logits, target, draft, probs = reduced()
    acceptance = torch.minimum(draft, probs).sum(-1)
    torch.testing.assert_close(neg_log_acceptance(logits, target), -acceptance.log())
    expected = gradient_of("tvd", logits, target) / acceptance.unsqueeze(-1)
    torch.testing.assert_close(gradient_of("neg_log_acceptance", logits, target), expected)


def test_argmax_value_and_gradient() -> None:
    logits, target, draft, probs = reduced()
    match = (draft * probs).sum(-1)
    torch.testing.assert_close(argmax(logits, target), -match.log())
    q = logits.softmax(-1)
    expected = q - q * target.exp() / match.unsqueeze(-1)
    torch.testing.assert_close(gradient_of("argmax", logits, target), expected)


def test_argmax_wants_the_best_id_alone_and_forgives_a_near_tie() -> None:
    target = torch.tensor([[0.6, 0.3, 0.1]], dtype=torch.float64).log()
    best, second, third = (torch.full((1, 3), -20.0, dtype=torch.float64) for _ in range(3))
    best[0, 0] = second[0, 1] = third[0, 2] = 0
    equal = target.clone()  # q = p, which every divergence likes best
    losses = [argmax(logits, target).item() for logits in (best, equal, second, third)]
    assert losses == sorted(losses) and losses[0] == pytest.approx(-math.log(0.6), abs=1e-6)
    tie = torch.tensor([[0.5, 0.49, 0.01]], dtype=torch.float64).log()
    assert argmax(second, tie) - argmax(best, tie) < 0.03
    labels = torch.tensor([0])
    assert cross_entropy(second, labels) - cross_entropy(best, labels) > 10  # which does not forgive it


@pytest.mark.parametrize("name", DIVERGENCES)
def test_gradients_lead_downhill(name: LossName) -> None:
    """A hundred small steps along each gradient on random positions: its own aim gets better."""
    logits, target, _, _ = reduced(rows=30)
    start = logits.detach().clone()
    for _ in range(100):
        logits = (logits - 0.5 * gradient_of(name, logits, target)).detach().requires_grad_()
    aim = argmax if name == "argmax" else tvd
    assert aim(logits, target).mean() < aim(start, target).mean()


@pytest.mark.parametrize("name", [name for name in DIVERGENCES if name != "argmax"])
def test_identical_distributions_cost_nothing(name: LossName) -> None:
    logits, _ = random_distributions()
    loss = divergence(name)(logits, logits.detach().log_softmax(-1))
    torch.testing.assert_close(loss, torch.zeros_like(loss), atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_point_masses_stay_finite(name: LossName, dtype: torch.dtype) -> None:
    certain = torch.full((3, 3), -torch.inf, dtype=dtype)
    certain[0, 1] = certain[2, 0] = 0  # row 1 keeps no mass: everything lies outside the draft vocabulary
    logits = torch.tensor(
        [[0.0, 60.0, 0.0], [1.0, 2.0, 3.0], [-200.0, 0.0, 9.0]], dtype=dtype, requires_grad=True
    )
    loss = divergence(name)(logits, certain)
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    assert loss.isfinite().all() and gradient.isfinite().all()
    assert loss[0].item() == pytest.approx(0, abs=1e-6)
    if name in ("forward_kl", "neg_log_acceptance", "argmax"):  # of a point mass: the cross-entropy
        torch.testing.assert_close(loss[2], cross_entropy(logits, torch.tensor([1, 1, 0]))[2])
        assert gradient[2, 0] == pytest.approx(-1)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_padded_rows_of_the_vocabulary_change_nothing(name: LossName) -> None:
    """Rows that no text uses, masked to -inf by the target and far below all others in the draft."""
    logits, target = random_distributions()
    rows = logits.shape[0]
    padding = torch.full((rows, 2), -1e4, dtype=torch.float64)
    padded = torch.cat((logits, padding), -1)
    never = torch.full((rows, 2), -torch.inf, dtype=torch.float64)
    loss = divergence(name)(padded, torch.cat((target, never), -1))
    torch.testing.assert_close(loss, divergence(name)(logits, target))
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    torch.testing.assert_close(gradient, gradient_of(name, logits, target))


def test_schedule_and_names() -> None:
    config = LossConfig(name="tvd", warm_start=WarmStart(name="forward_kl", share=0.3))
    assert [config.at(step, 10) for step in range(10)] == ["forward_kl"] * 3 + ["tvd"] * 7
    assert config.names == {"forward_kl", "tvd"} and LossConfig().names == {"forward_kl"}
    assert [LossConfig().at(step, 2) for step in range(2)] == ["forward_kl"] * 2


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_equals_the_divergence_of_trls_gkd(beta: float, temperature: float) -> None:
    from trl.experimental.gkd import GKDTrainer

    generator = torch.Generator().manual_seed(4)
    draft, target = (torch.randn(2, 5, 11, generator=generator, dtype=torch.float64) for _ in range(2))
    labels = torch.tensor([[1, 2, -100, 4, 5], [-100, -100, 3, 4, -100]])  # padding and prompt are masked
    theirs = GKDTrainer.generalized_jsd_loss(
        draft, target, labels, beta=beta, temperature=temperature, reduction="sum"
    )
    mask = labels != -100
    logits, log_probs = draft[mask] / temperature, (target[mask] / temperature).log_softmax(-1)
    ours = {0.0: forward_kl, 1.0: reverse_kl}.get(beta) or divergence("jsd", beta=beta)
    torch.testing.assert_close(ours(logits, log_probs).sum(), theirs)
