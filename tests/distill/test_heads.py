"""The chunked form over heads that do more than multiply, padded and reduced vocabularies, and top-k targets:
the values and gradients of the menu's own functions.

Shapes as in `distill.losses`; K ids kept of each token.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from distill.chunked import chunked_loss
from distill.heads import TargetRows, TopKRows
from distill.loss_config import LossName
from distill.losses import cross_entropy, divergence
from evaluation.head import Head

N, V, H, T = 11, 23, 8, 6
NAMES: tuple[LossName, ...] = (
    "forward_kl",
    "reverse_kl",
    "jsd",
    "tvd",
    "tvd_pp",
    "neg_log_acceptance",
    "lk_hybrid",
    "argmax",
)
COARSE = ("forward_kl", "reverse_kl", "jsd", "tvd", "neg_log_acceptance", "lk_hybrid")
"""Losses that see the others of a top-k target as one id."""


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def transformed(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: float, cap: float | None
) -> Tensor:
    """A head's logits, written out."""
    logits = hidden @ weight.T
    logits = scale * (logits if bias is None else logits + bias)
    return logits if cap is None else cap * torch.tanh(logits / cap)


@pytest.mark.parametrize("name", [*NAMES, "cross_entropy"])
@pytest.mark.parametrize(
    ("scale", "cap", "with_bias"), [(0.25, None, False), (1.0, 2.0, True), (1.5, 3.0, True)]
)
def test_heads_with_scale_soft_cap_and_bias(
    name: Any, scale: float, cap: float | None, with_bias: bool
) -> None:
    leaves = [draw(N, H, seed=1), draw(V, H, seed=2), *([draw(V, seed=3)] if with_bias else [])]
    target_hidden, target_weight, target_bias = draw(N, T, seed=4), draw(V, T, seed=5), draw(V, seed=6)
    labels = torch.arange(N) - 1
    full = transformed(target_hidden, target_weight, target_bias, 0.5, 4.0) / 0.7
    target = TargetRows(target_hidden, Head(target_weight, target_bias, 0.5, 4.0), full.logsumexp(-1))

    plain = [leaf.clone().requires_grad_() for leaf in leaves]
    logits = transformed(plain[0], plain[1], plain[2] if with_bias else None, scale, cap) / 0.7
    if name == "cross_entropy":
        expected = cross_entropy(logits, labels).sum()
    else:
        expected = divergence(name)(logits, full.log_softmax(-1)).sum()
    wanted = torch.autograd.grad(3 * expected, plain)

    ours = [leaf.clone().requires_grad_() for leaf in leaves]
    head = Head(ours[1], ours[2] if with_bias else None, scale, cap)
    sums = chunked_loss(
        name, ours[0], head, target=target, labels_N=labels, temperature=0.7, rows_per_chunk=4
    )
    torch.testing.assert_close(sums.loss, expected.detach())
    for found, theirs in zip(torch.autograd.grad(3 * sums.loss, ours), wanted, strict=True):
        torch.testing.assert_close(found, theirs)


def test_the_head_is_trls() -> None:
    """The kernel of trl's distillation trainers, with soft-cap, scale and bias on both sides."""
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    hidden, weight, bias = draw(N, H, seed=1).float(), draw(V, H, seed=2).float(), draw(V, seed=3).float()
    target_hidden, target_weight = draw(N, T, seed=4).float(), draw(V, T, seed=5).float()
    leaves = [hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]
    theirs, _ = ChunkedDivergenceFunction.apply(
        *leaves, target_hidden, target_weight, None, 0.0, 0.8, 0.5, 3.0, 2.0, 5.0
    )
    wanted = torch.autograd.grad(theirs.sum(), leaves)
    target_head = Head(target_weight, None, 2.0, 5.0)
    full = target_head.logits(target_hidden, torch.float32) / 0.8
    target = TargetRows(target_hidden, target_head, full.logsumexp(-1))
    ours = chunked_loss("forward_kl", hidden, Head(weight, bias, 0.5, 3.0), target=target, temperature=0.8)
    torch.testing.assert_close(ours.loss, theirs.sum().detach(), rtol=1e-4, atol=1e-4)
    for found, other in zip(torch.autograd.grad(ours.loss, leaves), wanted, strict=True):
        torch.testing.assert_close(found, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("padded", [(V + 5, V + 2), (V, V + 9), (V + 3, V)])
def test_padding_ids_take_no_part(name: LossName, padded: tuple[int, int]) -> None:
    """Heads of unequal length with V real ids, as in pairs that differ by padding alone: what stands in the
    padding rows changes nothing, and they get no gradient."""
    ours, theirs = padded
    losses, gradients = [], []
    for filling in (0.0, 30.0):
        weight = torch.cat([draw(V, H, seed=2), torch.full((ours - V, H), filling, dtype=torch.float64)])
        target_weight = torch.cat(
            [draw(V, T, seed=5), torch.full((theirs - V, T), -filling, dtype=torch.float64)]
        )
        hidden, target_hidden = draw(N, H, seed=1).requires_grad_(), draw(N, T, seed=4)
        weight.requires_grad_()
        real = target_weight[:V]
        target = TargetRows(target_hidden, real, (target_hidden @ real.T).logsumexp(-1))
        loss = chunked_loss(name, hidden, Head(weight[:V]), target=target).loss
        losses.append(loss.detach())
        gradients.append(torch.autograd.grad(loss, [hidden, weight]))
        assert not gradients[-1][1][V:].any()
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize("name", NAMES)
def test_a_full_vocabulary_is_normalised_on_the_way(name: LossName) -> None:
    target_hidden, target_weight = draw(N, T, seed=4), draw(V, T, seed=5)
    normaliser = (target_hidden @ target_weight.T / 0.7).logsumexp(-1)
    losses = [
        chunked_loss(
            name,
            draw(N, H, seed=1),
            draw(V, H, seed=2),
            target=TargetRows(target_hidden, target_weight, given),
            temperature=0.7,
            rows_per_chunk=4,
        ).loss
        for given in (normaliser, None)
    ]
    torch.testing.assert_close(losses[0], losses[1])


# --- top-k ---


def top_k(log_probs: Tensor, count: int) -> TopKRows:
    kept, ids = log_probs.topk(count, dim=-1)
    return TopKRows(ids, kept, (1 - kept.exp().sum(-1)).clamp(min=0))


def bucketed(logits: Tensor, ids: Tensor) -> Tensor:
    """Log-probabilities of the kept ids, and of all others taken as one."""
    log_draft = logits.log_softmax(-1)
    rest = log_draft.scatter(1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([log_draft.gather(1, ids), rest], dim=-1)


@pytest.mark.parametrize("name", COARSE)
@pytest.mark.parametrize("count", [1, 5, V - 1])
def test_all_others_count_as_one_id(name: LossName, count: int) -> None:
    full = (2 * draw(N, V, seed=7)).log_softmax(-1)
    rows = top_k(full, count)
    logits = draw(N, V, seed=8).requires_grad_()
    target = torch.cat([rows.log_probs_NK, rows.tail_N.log()[:, None]], dim=-1)
    expected = divergence(name)(bucketed(logits, rows.ids_NK), target).sum()
    (wanted,) = torch.autograd.grad(expected, logits)
    hidden = logits.detach().requires_grad_()
    identity = torch.eye(V, dtype=torch.float64)
    sums = chunked_loss(name, hidden, identity, target=rows, rows_per_chunk=4)
    torch.testing.assert_close(sums.loss, expected.detach())
    torch.testing.assert_close(torch.autograd.grad(sums.loss, hidden)[0], wanted)


@pytest.mark.parametrize("name", NAMES)
def test_all_ids_kept_are_the_loss_itself(name: LossName) -> None:
    full, logits = draw(N, V, seed=7).log_softmax(-1), draw(N, V, seed=8)
    sums = chunked_loss(name, logits, torch.eye(V, dtype=torch.float64), target=top_k(full, V))
    torch.testing.assert_close(sums.loss, divergence(name)(logits, full).sum())


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("count", [1, 4, 12])
def test_the_bounds_on_what_top_k_misses(count: int, seed: int) -> None:
    full, logits = (3 * draw(1, V, seed=seed)).log_softmax(-1), 2 * draw(1, V, seed=seed + 50)
    rows, identity = top_k(full, count), torch.eye(V, dtype=torch.float64)
    log_draft = logits.log_softmax(-1)
    outside = log_draft.scatter(1, rows.ids_NK, torch.inf)
    u, t = bucketed(logits, rows.ids_NK)[:, -1].exp(), rows.tail_N
    bounds = {
        "tvd": torch.minimum(t, u),
        "forward_kl": t * (rows.log_probs_NK[:, -1].exp() * u / (t * outside.amin(-1).exp())).log(),
    }
    missed = {}
    for name, bound in bounds.items():
        exact = divergence(name)(logits, full)  # type: ignore[arg-type]
        missed[name] = float(exact - chunked_loss(name, logits, identity, target=rows).loss)  # type: ignore[arg-type]
        assert -1e-12 <= missed[name] <= float(bound) + 1e-12
    assert missed["forward_kl"] > 0  # something is missed, so the bound is tried


@pytest.mark.parametrize("seed", range(5))
def test_the_bound_of_tvd_holds_over_a_reduced_vocabulary(seed: int) -> None:
    full, vocab = (3 * draw(N, V, seed=seed)).log_softmax(-1), torch.arange(0, V, 2)
    kept, ids = full.topk(4, dim=-1)
    row_of = torch.full((V,), -1)
    row_of[vocab] = torch.arange(len(vocab))
    assert (row_of[ids] < 0).any()
    rows = TopKRows(row_of[ids], kept, 1 - kept.exp().sum(-1))
    logits = draw(N, len(vocab), seed=seed + 50)
    identity = torch.eye(len(vocab), dtype=torch.float64)
    one_by_one = [
        float(
            chunked_loss(
                "tvd",
                logits[n : n + 1],
                identity,
                target=TopKRows(rows.ids_NK[n : n + 1], kept[n : n + 1], rows.tail_N[n : n + 1]),
            ).loss
        )
        for n in range(N)
    ]
    exact = divergence("tvd")(logits, full[:, vocab])
    for n in range(N):
        inside = rows.ids_NK[n][rows.ids_NK[n] >= 0]
        u = 1 - logits[n].softmax(-1)[inside].sum()
        assert -1e-12 <= float(exact[n]) - one_by_one[n] <= float(torch.minimum(u, rows.tail_N[n])) + 1e-12


def test_a_target_that_is_certain_stays_finite() -> None:
    rows = TopKRows(torch.tensor([[2, 0]]), torch.tensor([[0.0, -1e30]]), torch.zeros(1))
    for name in NAMES:
        hidden = torch.tensor([[0.0, 1.0, 80.0]], requires_grad=True)
        loss = chunked_loss(name, hidden, torch.eye(3), target=rows).loss
        assert loss.isfinite() and torch.autograd.grad(loss, hidden)[0].isfinite().all(), name


# --- at size ---


@pytest.mark.slow
@pytest.mark.parametrize("name", [*NAMES, "cross_entropy"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_vocabulary_of_128256_ids(name: Any, dtype: torch.dtype) -> None:
    """Against the eager functions in float64 on the very same (rounded) inputs."""
    size, tokens, width = 128_256, 24, 32
    hidden, weight = draw(tokens, width, seed=1, dtype=dtype), draw(size, width, seed=2, dtype=dtype) / 2
    target_hidden, target_weight = (
        draw(tokens, width, seed=3, dtype=dtype),
        draw(size, width, seed=4, dtype=dtype) / 2,
    )
    labels = torch.arange(tokens) * 5000
    wide = [tensor.double().requires_grad_() for tensor in (hidden, weight)]
    logits = wide[0] @ wide[1].T
    full = target_hidden.double() @ target_weight.double().T
    if name == "cross_entropy":
        expected = cross_entropy(logits, labels).sum()
    else:
        expected = divergence(name)(logits, full.log_softmax(-1)).sum()
    wanted = torch.autograd.grad(expected, wide)
    ours = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
    target = TargetRows(target_hidden, target_weight, full.logsumexp(-1).float())
    loss = chunked_loss(name, ours[0], ours[1], target=target, labels_N=labels, rows_per_chunk=10).loss
    narrow = dtype == torch.bfloat16  # its products are rounded to 8 bits before the softmax
    assert loss.item() == pytest.approx(expected.item(), rel=0.02 if narrow else 1e-4)
    for found, exact in zip(torch.autograd.grad(loss, ours), wanted, strict=True):
        error = (found.double() - exact).norm() / exact.norm()
        assert error < (0.1 if narrow else 1e-3), name
