"""What the target says at every completion position, from one forward pass over finished text.

Shapes: B samples, T positions, N completion tokens of the batch in row-major order, H the target's hidden
size, V its vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from data.errors import UserError
from data.records import Batch
from data.signals import Signals, TopK, concatenate
from evaluation.head import Head, as_head, head_of, row_blocks

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def completion_states(
    model: PreTrainedModel, input_ids: Tensor, completion_mask: Tensor, position_ids: Tensor | None = None
) -> Tensor:
    """The hidden states (after the final norm) that predict the completion tokens: [N, H].

    The state that predicts the token at t stands at t - 1, so the first answer token is predicted from the
    prompt's last position. No attention mask is passed: rows are padded on the right, and under causal
    attention no real position looks at what follows it, which lets attention run its fast causal kernel.

    Args: `input_ids` int64 [B, T], `completion_mask` bool [B, T], and for texts that stand one after another
    in one row `position_ids` int64 [1, T] that begin at 0 with each: no text then looks at another, and no
    completion begins a text, so no state predicts across their border.
    """
    decoder = model.get_decoder()
    hidden = decoder(input_ids=input_ids, position_ids=position_ids, use_cache=False).last_hidden_state
    return hidden[:, :-1][completion_mask[:, 1:]]


@torch.no_grad()
def target_signals(target: PreTrainedModel, batch: Batch, temperature: float) -> Signals:
    """The signals of a batch, computed now: what sampling caches, for samples that came without.

    `logsumexp` (float32 [N]) is the log-normaliser of the target's logits / `temperature` over its whole
    head, a block of rows at a time; `hidden` [N, H] keeps the target's dtype; `argmax` is int64 [N].
    """
    device = target.device
    positions = None if batch.position_ids is None else batch.position_ids.to(device)
    mask = batch.completion_mask.to(device)
    hidden = completion_states(target, batch.input_ids.to(device), mask, positions)
    return signals_of_states(target, hidden, temperature)


@torch.no_grad()
def signals_of_states(target: PreTrainedModel, hidden: Tensor, temperature: float) -> Signals:
    """The same from the last hidden states [N, H] that predict the tokens, where they are at hand."""
    device = target.device
    head = head_of(target)
    logsumexp = torch.empty(len(hidden), dtype=torch.float32, device=device)
    argmax = torch.empty(len(hidden), dtype=torch.int64, device=device)
    for block in row_blocks(len(hidden), len(head)):
        logits = head.logits(hidden[block])
        argmax[block] = logits.argmax(-1)
        logsumexp[block] = torch.logsumexp(logits.div_(temperature), dim=-1)
    return Signals(hidden=hidden, logsumexp=logsumexp, argmax=argmax)


@torch.no_grad()
def in_half(signals: Signals) -> Signals:
    """The same signals with hidden states in float16, half as large as float32 ones.

    What that may change: each number of a state h is rounded by at most `2^-11 |h_i|`, or 2^-25 where it is
    tiny, and the log-normaliser stays exact. So every log-probability at temperature T moves by at most

        eps = max_v sum_i max(2^-11 |h_i|, 2^-25) |W_vi| scale / T

    (`half_bound`), and acceptance, sum min(p, q), by a factor between exp(-eps) and exp(eps). Raises
    `UserError` where a number is too large for float16.
    """
    half = signals.hidden.to(torch.float16)
    if not bool(half.isfinite().all()):
        raise UserError(
            "The target's hidden states are too large for float16: write train.signal: hidden, which keeps "
            "them in the target's dtype."
        )
    return Signals(half, signals.logsumexp, signals.argmax)


def half_bound(hidden_NH: Tensor, head_VH: Head | Tensor, temperature: float) -> Tensor:
    """eps of `in_half` for each token, [N], of the states before rounding; a cap only lessens it."""
    head = as_head(head_VH)
    error_NH = (hidden_NH.abs() * 2.0**-11).clamp(min=2.0**-25)
    return (error_NH @ head.weight_VH.abs().T).amax(-1) * abs(head.scale) / temperature


@torch.no_grad()
def top_k_of(signals: Signals, head_VH: Head | Tensor, count: int, temperature: float) -> TopK:
    """The `count` most likely ids of each token with their true log-probabilities, and the mass of the rest.

    What that may change is said at `distill.heads.TopKRows`.
    """
    parts = []
    head = as_head(head_VH)
    for block in row_blocks(len(signals), len(head)):
        logits = head.logits(signals.hidden[block].to(head.weight_VH)).div_(temperature)
        # Normalised anew, so that the mass adds up to 1 to the last bit that float32 has
        log_probs = logits.sub_(logits.logsumexp(-1, keepdim=True))
        kept, ids = log_probs.topk(count, dim=-1)
        log_probs.scatter_(-1, ids, -torch.inf)
        parts.append(TopK(ids.int().cpu(), kept.cpu(), log_probs.exp_().sum(-1).clamp_(max=1).cpu()))
    return concatenate(parts)
