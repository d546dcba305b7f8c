"""The chunked application of every loss against the menu's own functions.

Shape legend: N tokens, V draft ids, F target ids, H draft hidden, T target hidden.
"""

from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from distill.chunked import TargetRows, chunked_loss
from distill.loss_config import LossName
from distill.losses import cross_entropy, divergence

N, V, F, H, T = 13, 17, 40, 8, 6
NAMES = get_args(LossName)
DIVERGENCES = [name for name in NAMES if name != "cross_entropy"]


@pytest.fixture
def case() -> dict[str, Any]:
    """Random states and heads in float64; the draft covers V of the target's F ids."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    target_hidden, full_head = draw(N, T), draw(F, T)
    vocab = torch.randperm(F, generator=generator)[:V].sort().values
    labels = torch.randint(-1, V, (N,), generator=generator)
    labels[:2] = torch.tensor([-1, 3])
    return {
        "hidden": draw(N, H),
        "head": draw(V, H),
        "target_hidden": target_hidden,
        "full_head": full_head,
        "vocab": vocab,
        "labels": labels,
    }


def target_of(case: dict[str, Any], temperature: float) -> tuple[TargetRows, Tensor]:
    """The target's rows for the chunked form, and its true log-probabilities for the eager one."""
    full_logits = case["target_hidden"] @ case["full_head"].T / temperature
    rows = TargetRows(case["target_hidden"], case["full_head"][case["vocab"]], full_logits.logsumexp(-1))
    return rows, full_logits.log_softmax(-1)[:, case["vocab"]]


def eager(name: LossName, case: dict[str, Any], hidden: Tensor, head: Tensor, temperature: float) -> Tensor:
    logits = hidden @ head.T / temperature
    if name == "cross_entropy":
        return cross_entropy(logits, case["labels"])
    return divergence(name)(logits, target_of(case, temperature)[1])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("rows_per_chunk", [None, 1, 5, N])
def test_chunked_equals_eager(
    name: LossName, temperature: float, rows_per_chunk: int | None, case: dict[str, Any]
) -> None:
    plain = [case["hidden"].clone().requires_grad_(), case["head"].clone().requires_grad_()]
    expected = eager(name, case, plain[0], plain[1], temperature).sum()
    expected_grads = torch.autograd.grad(2.5 * expected, plain)

    hidden, head = (tensor.clone().requires_grad_() for tensor in (case["hidden"], case["head"]))
    target, log_probs = target_of(case, temperature)
    sums = chunked_loss(
        name,
        hidden,
        head,
        target=target,
        labels_N=case["labels"],
        temperature=temperature,
        rows_per_chunk=rows_per_chunk,
    )
    torch.testing.assert_close(sums.loss, expected.detach())
    for ours, theirs in zip(
        torch.autograd.grad(2.5 * sums.loss, [hidden, head]), expected_grads, strict=True
    ):
        torch.testing.assert_close(ours, theirs)
    if name == "cross_entropy":
        assert sums.acceptance is None
    else:
        draft = (case["hidden"] @ case["head"].T / temperature).softmax(-1)
        assert sums.acceptance is not None
        torch.testing.assert_close(sums.acceptance, torch.minimum(draft, log_probs.exp()).sum())


@pytest.mark.parametrize("name", NAMES)
def test_chunked_in_float32_and_bfloat16(name: LossName, case: dict[str, Any]) -> None:
    target, _ = target_of(case, 1.0)
    exact = chunked_loss(name, case["hidden"], case["head"], target=target, labels_N=case["labels"])
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        rows = TargetRows(target.hidden_NT.to(dtype), target.head_VT.to(dtype), target.logsumexp_N.float())
        hidden, head = (tensor.to(dtype).requires_grad_() for tensor in (case["hidden"], case["head"]))
        sums = chunked_loss(name, hidden, head, target=rows, labels_N=case["labels"], rows_per_chunk=4)
        assert sums.loss.dtype == torch.float32  # sums are wide whatever the products are
        assert sums.loss.item() == pytest.approx(exact.loss.item(), rel=tolerance)
        grads = torch.autograd.grad(sums.loss, [hidden, head])
        assert [grad.dtype for grad in grads] == [dtype, dtype]


def test_autocast_narrows_the_products_only(case: dict[str, Any]) -> None:
    target, _ = target_of(case, 1.0)
    rows = TargetRows(target.hidden_NT.float(), target.head_VT.float(), target.logsumexp_N.float())
    hidden, head = case["hidden"].float().requires_grad_(), case["head"].float().requires_grad_()
    plain = chunked_loss("forward_kl", hidden, head, target=rows)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        narrow = chunked_loss("forward_kl", hidden, head, target=rows)
    assert narrow.loss.item() != plain.loss.item()
    assert narrow.loss.item() == pytest.approx(plain.loss.item(), rel=0.05)
    assert [grad.dtype for grad in torch.autograd.grad(narrow.loss, [hidden, head])] == [torch.float32] * 2


def test_gradients_only_where_they_are_wanted(case: dict[str, Any]) -> None:
    target, _ = target_of(case, 1.0)
    head = case["head"].clone().requires_grad_()
    sums = chunked_loss("tvd", case["hidden"], head, target=target)
    assert torch.autograd.grad(sums.loss, head)[0].abs().max() > 0
    assert not chunked_loss("tvd", case["hidden"], case["head"], target=target).loss.requires_grad


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_without_completion_tokens_is_refused(name: LossName, case: dict[str, Any]) -> None:
    target = TargetRows(torch.empty(0, T), case["full_head"][case["vocab"]], torch.empty(0))
    labels = torch.empty(0, dtype=torch.int64)
    with pytest.raises(ValueError, match="No completion token"):
        chunked_loss(name, torch.empty(0, H), case["head"], target=target, labels_N=labels)


def test_a_missing_signal_is_refused(case: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="needs the target rows"):
        chunked_loss("tvd", case["hidden"], case["head"], labels_N=case["labels"])
    with pytest.raises(ValueError, match="needs labels"):
        chunked_loss("cross_entropy", case["hidden"], case["head"], target=target_of(case, 1.0)[0])


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_point_masses_as_the_menu_has_them(name: LossName, dtype: torch.dtype) -> None:
    certain = torch.full((2, 3), -torch.inf, dtype=dtype)
    certain[0, 1] = 0  # row 1 keeps no mass at all: everything lies outside the draft vocabulary
    logits = torch.tensor([[0.0, 60.0, 0.0], [1.0, 2.0, 3.0]], dtype=dtype, requires_grad=True)
    loss = divergence(name)(logits, certain)
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    # the identity as head makes the hidden states the logits
    hidden = logits.detach().requires_grad_()
    target = TargetRows(
        torch.where(certain.isinf(), -1e30, certain), torch.eye(3, dtype=dtype), torch.zeros(2, dtype=dtype)
    )
    sums = chunked_loss(name, hidden, torch.eye(3, dtype=dtype), target=target)
    torch.testing.assert_close(sums.loss, loss.sum().detach())
    torch.testing.assert_close(torch.autograd.grad(sums.loss, hidden)[0], gradient)


def test_forward_kl_is_trls_divergence_at_beta_0() -> None:
    """The kernel of trl's distillation trainers, with its own chunking, on a full vocabulary."""
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    generator = torch.Generator().manual_seed(3)
    hidden, target_hidden = (torch.randn(N, size, generator=generator) for size in (H, T))
    head, target_head = torch.randn(F, H, generator=generator), torch.randn(F, T, generator=generator)
    for temperature in (1.0, 0.7):
        theirs, _ = ChunkedDivergenceFunction.apply(
            hidden, head, None, target_hidden, target_head, None, 0.0, temperature, 1.0, None, 1.0, None
        )
        rows = TargetRows(
            target_hidden, target_head, (target_hidden @ target_head.T / temperature).logsumexp(-1)
        )
        ours = chunked_loss("forward_kl", hidden, head, target=rows, temperature=temperature)
        torch.testing.assert_close(ours.loss, theirs.sum(), rtol=1e-4, atol=1e-4)
