"""A loss from hidden states to gradients, a block of rows at a time: no [tokens, vocabulary] tensor is ever
alive.

Shape legend as in `distill.losses`: N completion tokens; V ids of the draft vocabulary; H width of the
draft's hidden states; T width of the target's; n rows of one block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from distill.heads import TargetRows, TopKRows
from distill.loss_config import LossName
from distill.losses import divergence
from evaluation.head import Head, as_head

# Elements of one [rows, V] block, of which about four live at once: 32 MiB each in float32 on a CPU, or 128
# rows, from which on they run equally fast; an accelerator wants longer blocks.
_BLOCK_ELEMENTS_CPU = 1 << 23
_BLOCK_ELEMENTS_ACCELERATOR = 1 << 26
_ROWS_AT_LEAST = 128


@dataclass(frozen=True)
class LossSums:
    """Sums over the N tokens: divide by the global count of completion tokens, never by padded positions."""

    loss: Tensor
    """Scalar, differentiable in the draft's hidden states and head."""
    acceptance: Tensor | None
    """Scalar, detached: sum of alpha over the tokens (`None` for cross-entropy, which sees no target
    probabilities)."""


def chunked_loss(
    name: LossName,
    draft_hidden_NH: Tensor,
    draft_head: Tensor | Head,
    *,
    target: TargetRows | TopKRows | None = None,
    labels_N: Tensor | None = None,
    temperature: float = 1.0,
    eta: float = 3.0,
    beta: float = 0.5,
    rows_per_chunk: int | None = None,
) -> LossSums:
    """The sum of a loss over N tokens straight from hidden states and heads, a block of rows at a time.

    No [N, V] tensor is ever alive; the gradients are computed in the forward pass, while the block is at
    hand. Exact: equal to the functions of `distill.losses` for any block size. `lk_hybrid` takes its mean
    acceptance over these N tokens, in a first pass without gradients where they do not fit one block. Softmax
    and sums are in float32 (float64 for float64 inputs), products in the inputs' dtype or in autocast's.

    Args:
        draft_hidden_NH, draft_head: floating point; the head's rows are the draft vocabulary in order.
        target: required by all but `cross_entropy`. labels_N: required by `cross_entropy`, see there.
        rows_per_chunk: rows of one block; by default as many as bound a block's memory, hundreds in practice.

    Raises `ValueError` when N is 0: nothing but padding and prompts would train on NaN.
    """
    if draft_hidden_NH.shape[0] == 0:
        raise ValueError(
            "No completion token in this batch: every position is masked, so there is nothing to train on."
        )
    if (labels_N if name == "cross_entropy" else target) is None:
        raise ValueError(
            f"The loss {name} needs {'labels' if name == 'cross_entropy' else 'the target rows'}."
        )
    device_type = draft_hidden_NH.device.type
    dtype = draft_hidden_NH.dtype
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
    block_elements = _BLOCK_ELEMENTS_CPU if device_type == "cpu" else _BLOCK_ELEMENTS_ACCELERATOR
    head = as_head(draft_head)
    rows = rows_per_chunk or max(_ROWS_AT_LEAST, block_elements // head.weight_VH.shape[0])
    settings = _Settings(name, temperature, eta, beta, rows, dtype, head.scale, head.soft_cap)
    loss, acceptance = _ChunkedLoss.apply(
        draft_hidden_NH, head.weight_VH, head.bias_V, target, labels_N, settings
    )
    return LossSums(loss, None if name == "cross_entropy" else acceptance)


@dataclass(frozen=True)
class _Settings:
    name: LossName
    temperature: float
    eta: float
    beta: float
    rows: int
    dtype: torch.dtype  # of the products
    scale: float
    soft_cap: float | None


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_NH, weight_VH, bias_V, target, labels_N, settings):  # type: ignore[no-untyped-def,override]
        with torch.autocast(hidden_NH.device.type, enabled=False):
            run = _Run(hidden_NH, weight_VH, bias_V, target, labels_N, settings)
            loss, acceptance, *gradients = run.sums(*ctx.needs_input_grad[:3])
        ctx.gradients = gradients
        ctx.mark_non_differentiable(acceptance)
        return loss, acceptance

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_loss, _):  # type: ignore[no-untyped-def,override]
        # Scaled in place and given away, for one of them is as large as the head
        grads, ctx.gradients = ctx.gradients, None
        assert grads is not None, "a second backward pass: the gradients are those of the first"
        return *(None if grad is None else grad.mul_(grad_loss) for grad in grads), None, None, None


class _Run:
    """One evaluation of `chunked_loss`: the inputs in the products' dtype, and the loop over blocks of
    rows."""

    def __init__(
        self,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        target: TargetRows | TopKRows | None,
        labels_N: Tensor | None,
        settings: _Settings,
    ) -> None:
        self.settings = settings
        self.out_dtypes = hidden_NH.dtype, weight_VH.dtype
        self.work_dtype = torch.promote_types(settings.dtype, torch.float32)
        self.hidden_NH, self.head_VH = hidden_NH.to(settings.dtype), weight_VH.to(settings.dtype)
        self.head = Head(self.head_VH, bias_V, settings.scale, settings.soft_cap)
        self.target, self.labels_N = target, labels_N

    def sums(
        self, for_hidden: bool, for_head: bool, for_bias: bool
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """(loss, acceptance, gradient in the hidden states, in the head's weight, in its bias), the gradients
        where wanted."""
        loss = acceptance = self.hidden_NH.new_zeros((), dtype=self.work_dtype)
        grad_hidden_NH = torch.empty_like(self.hidden_NH) if for_hidden else None
        grad_head_VH = torch.zeros_like(self.head_VH, dtype=self.work_dtype) if for_head else None
        bias_V = self.head.bias_V
        grad_bias_V = torch.zeros_like(bias_V, dtype=self.work_dtype) if for_bias else None  # type: ignore[arg-type]
        weight = self._kl_weight()
        for block in self._blocks():
            loss_block, acceptance_block, grad_nV = self._block(
                block, weight, for_hidden or for_head or for_bias
            )
            loss, acceptance = loss + loss_block, acceptance + acceptance_block
            if grad_nV is None:
                continue
            if grad_bias_V is not None:
                grad_bias_V += grad_nV.sum(0)
            grad_nV = grad_nV.to(self.settings.dtype)
            if grad_hidden_NH is not None:
                torch.mm(grad_nV, self.head_VH, out=grad_hidden_NH[block])
            if grad_head_VH is not None:
                if grad_head_VH.dtype == grad_nV.dtype:
                    grad_head_VH.addmm_(grad_nV.T, self.hidden_NH[block])
                else:
                    grad_head_VH += grad_nV.T @ self.hidden_NH[block]
        if grad_hidden_NH is not None:
            grad_hidden_NH = grad_hidden_NH.to(self.out_dtypes[0])
        if grad_head_VH is not None:
            grad_head_VH = grad_head_VH.to(self.out_dtypes[1])
        if grad_bias_V is not None:
            assert bias_V is not None
            grad_bias_V = grad_bias_V.to(bias_V.dtype)
        return loss, acceptance, grad_hidden_NH, grad_head_VH, grad_bias_V

    def _blocks(self) -> Iterator[slice]:
        for start in range(0, len(self.hidden_NH), self.settings.rows):
            yield slice(start, start + self.settings.rows)

    def _kl_weight(self) -> Tensor | None:
        """lambda of `lk_hybrid`, or `None` where one block holds all rows and can find it itself."""
        if self.settings.name != "lk_hybrid" or len(self.hidden_NH) <= self.settings.rows:
            return None
        overlap = self.hidden_NH.new_zeros((), dtype=self.work_dtype)
        for block in self._blocks():
            log_draft_nV = self._log_draft(block)[0]
            log_target_nV = self._target_log_probs(block, log_draft_nV)
            overlap += torch.minimum(log_draft_nV.exp_(), log_target_nV.exp_()).sum()
        return self._weight(overlap)

    def _weight(self, overlap: Tensor) -> Tensor:
        return torch.exp(-self.settings.eta * overlap / len(self.hidden_NH))

    def _log_draft(self, block: slice) -> tuple[Tensor, Tensor | float]:
        """The draft's log-probabilities [n, V] of a block, and the slope of its logits over the product."""
        logits_nV = self.head.logits(self.hidden_NH[block], self.work_dtype)
        slope = self.head.slope(logits_nV)
        if self.settings.temperature != 1:
            logits_nV.div_(self.settings.temperature)
        return torch.log_softmax(logits_nV, dim=-1), slope

    def _target_log_probs(self, block: slice, log_draft_nV: Tensor) -> Tensor:
        assert self.target is not None
        return self.target.log_probs(block, log_draft_nV, self.settings.temperature)

    def _block(
        self, block: slice, weight: Tensor | None, want_grad: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Loss, acceptance and the gradient in `hidden @ weight.T + bias` of one block of n rows."""
        log_draft_nV, slope = self._log_draft(block)
        if self.settings.name == "cross_entropy":
            loss, grad_nV = self._cross_entropy_block(block, log_draft_nV, want_grad)
            overlap = loss.new_zeros(())
        else:
            loss, overlap, grad_nV = self._divergence_block(block, log_draft_nV, weight, want_grad)
        if grad_nV is not None and self.settings.temperature != 1:
            grad_nV.div_(self.settings.temperature)
        if grad_nV is not None and not (isinstance(slope, float) and slope == 1):
            grad_nV.mul_(slope)
        return loss, overlap, grad_nV

    def _cross_entropy_block(
        self, block: slice, log_draft_nV: Tensor, want_grad: bool
    ) -> tuple[Tensor, Tensor | None]:
        assert self.labels_N is not None
        known_n = self.labels_N[block] >= 0
        index_n1 = self.labels_N[block].clamp(min=0).unsqueeze(-1)
        loss = -log_draft_nV.gather(-1, index_n1).squeeze(-1)[known_n].sum()
        if not want_grad:
            return loss, None
        grad_nV = log_draft_nV.exp_()
        grad_nV.scatter_add_(-1, index_n1, grad_nV.new_full((), -1.0).expand_as(index_n1))
        return loss, grad_nV.mul_(known_n.unsqueeze(-1))

    def _divergence_block(
        self, block: slice, log_draft_nV: Tensor, weight: Tensor | None, want_grad: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """All but cross-entropy; forward KL, TVD and their mix by hand and in place, for each pass over
        [n, V] costs about as much as a tenth of a product."""
        name = self.settings.name
        log_target_nV = self._target_log_probs(block, log_draft_nV)
        target_nV = log_target_nV.exp()
        if name not in ("forward_kl", "tvd", "lk_hybrid"):
            return self._eager_block(log_draft_nV, log_target_nV, target_nV, want_grad)
        kl = None
        if name != "tvd":
            # p = 0 exactly where log p is -inf or underflows; a finite log p keeps 0 * (log p - log q) at 0
            log_target_nV.clamp_(min=torch.finfo(self.work_dtype).min / 4).sub_(log_draft_nV)
            mass_n = target_nV.sum(-1)
            kl = (
                torch.linalg.vecdot(target_nV, log_target_nV).sum()
                - torch.special.xlogy(mass_n, mass_n).sum()
            )
        draft_nV = log_draft_nV.exp_()
        overlap = torch.minimum(target_nV, draft_nV, out=log_target_nV).sum()
        rows = len(target_nV)
        if name == "lk_hybrid" and weight is None:
            weight = self._weight(overlap)
        if kl is None:
            loss = rows - overlap
        elif name == "forward_kl":
            loss = kl
        else:
            assert weight is not None
            loss = weight * kl + (1 - weight) * (rows - overlap)
        if not want_grad:
            return loss, overlap, None
        if name == "forward_kl":
            return loss, overlap, draft_nV.mul_(mass_n.unsqueeze(-1)).sub_(target_nV)
        below_nV = log_target_nV.copy_(draft_nV < target_nV)
        share_n1 = torch.linalg.vecdot(below_nV, draft_nV).unsqueeze(-1)
        if name == "tvd":
            return loss, overlap, below_nV.sub_(share_n1).neg_().mul_(draft_nV)
        assert weight is not None
        # lambda (m q - p) + (1 - lambda) q (s - below), gathered as q * (...) - lambda p
        factor_nV = below_nV.mul_(weight - 1).add_(weight * mass_n.unsqueeze(-1) + (1 - weight) * share_n1)
        return loss, overlap, factor_nV.mul_(draft_nV).sub_(target_nV.mul_(weight))

    def _eager_block(
        self, log_draft_nV: Tensor, log_target_nV: Tensor, target_nV: Tensor, want_grad: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """A loss as `distill.losses` has it, with its gradient in the draft's logits by autograd over this
        block. Log-probabilities serve as logits: both have the same softmax, so the same gradient."""
        overlap = torch.minimum(target_nV, log_draft_nV.exp()).sum()
        loss_of = divergence(self.settings.name, beta=self.settings.beta)
        with torch.set_grad_enabled(want_grad):
            logits_nV = log_draft_nV.requires_grad_(want_grad)
            loss = loss_of(logits_nV, log_target_nV).sum()
        grad_nV = torch.autograd.grad(loss, logits_nV)[0] if want_grad else None
        return loss.detach(), overlap, grad_nV
