"""What the target says at every completion position, from one forward pass over finished text.

Shapes: B samples, T positions, N completion tokens of the batch in row-major order, H the target's hidden
size, V its vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from data.records import Batch, Signals

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_BLOCK_ELEMENTS = 1 << 24  # of one [rows, V] block of logits


def completion_states(model: PreTrainedModel, input_ids: Tensor, completion_mask: Tensor) -> Tensor:
    """The hidden states (after the final norm) that predict the completion tokens: [N, H].

    The state that predicts the token at t stands at t - 1, so the first answer token is predicted from the
    prompt's last position. No attention mask is passed: rows are padded on the right, and under causal
    attention no real position looks at what follows it, which lets attention run its fast causal kernel.

    Args: `input_ids` int64 [B, T], `completion_mask` bool [B, T].
    """
    hidden = model.get_decoder()(input_ids=input_ids, use_cache=False).last_hidden_state
    return hidden[:, :-1][completion_mask[:, 1:]]


@torch.no_grad()
def target_signals(target: PreTrainedModel, batch: Batch, temperature: float) -> Signals:
    """The signals of a batch, computed now: what sampling caches, for samples that came without.

    `logsumexp` (float32 [N]) is the log-normaliser of the target's logits / `temperature` over its whole
    head, a block of rows at a time; `hidden` [N, H] keeps the target's dtype; `argmax` is int64 [N].
    """
    device = target.device
    hidden = completion_states(target, batch.input_ids.to(device), batch.completion_mask.to(device))
    return signals_of_states(target, hidden, temperature)


@torch.no_grad()
def signals_of_states(target: PreTrainedModel, hidden: Tensor, temperature: float) -> Signals:
    """The same from the last hidden states [N, H] that predict the tokens, where they are at hand."""
    device = target.device
    head = target.get_output_embeddings().weight
    logsumexp = torch.empty(len(hidden), dtype=torch.float32, device=device)
    argmax = torch.empty(len(hidden), dtype=torch.int64, device=device)
    rows = max(1, _BLOCK_ELEMENTS // head.shape[0])
    for start in range(0, len(hidden), rows):
        block = slice(start, start + rows)
        logits = (hidden[block] @ head.T).float()
        argmax[block] = logits.argmax(-1)
        logsumexp[block] = torch.logsumexp(logits.div_(temperature), dim=-1)
    return Signals(hidden=hidden, logsumexp=logsumexp, argmax=argmax)
