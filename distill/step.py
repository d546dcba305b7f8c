"""One batch of training: from samples to tensors, and from tensors to the summed loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from data.records import collate
from distill.choice import most_learnable
from distill.chunked import TargetRows, chunked_loss
from distill.loss_config import LossName
from evaluation.signals import completion_states

if TYPE_CHECKING:
    from distill.trainer import Run


def loss_forward(
    model: PreTrainedModel,
    *,
    name: LossName,
    eta: float,
    beta: float,
    temperature: float,
    share: float | None,
    target_head: Tensor,
    rows: Tensor | None,
    input_ids: Tensor,
    completion_mask: Tensor,
    hidden: Tensor | None = None,
    logsumexp: Tensor | None = None,
    reference: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """Summed loss over the batch's completion tokens (or the chosen share of them) and, detached, their
    summed acceptance.

    `rows` maps target ids to rows of the draft head, `None` where they are the same.
    """
    states = completion_states(model, input_ids, completion_mask)
    target = labels = None
    if name == "cross_entropy":
        ids = input_ids[:, 1:][completion_mask[:, 1:]]
        labels = ids if rows is None else rows[ids]
    else:
        assert hidden is not None and logsumexp is not None
        target = TargetRows(hidden.to(target_head.dtype), target_head, logsumexp)
    head = model.get_output_embeddings().weight
    if share is not None and reference is not None and target is not None:
        chosen = most_learnable(
            states.detach(), head.detach(), target, reference, temperature=temperature, share=share
        )
        states = states[chosen]
        target = TargetRows(target.hidden_NT[chosen], target_head, target.logsumexp_N[chosen])
    sums = chunked_loss(
        name,
        states,
        head,
        target=target,
        labels_N=labels,
        temperature=temperature,
        eta=eta,
        beta=beta,
    )
    return sums.loss, sums.acceptance


def row_of_id(vocab: Tensor | None, full_size: int, device: torch.device) -> Tensor | None:
    """int64 [V]: each target id's row of a reduced head, -1 where it has none."""
    if vocab is None:
        return None
    rows = torch.full((full_size,), -1, dtype=torch.int64, device=device)
    rows[vocab.to(device)] = torch.arange(len(vocab), device=device)
    return rows


class Collator:
    """Turns one row of the plan into the tensors of one batch."""

    def __init__(self, run: Run) -> None:
        self.samples, self.pad_id, self.reference = run.train, run.target.pad_id, run.reference
        self.with_signals = run.config.signal == "hidden" and run.config.loss.names != {"cross_entropy"}

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        (row,) = rows
        batch = collate(self.samples, row["samples"], self.pad_id)
        inputs = {
            "input_ids": batch.input_ids,
            "attention_mask": batch.attention_mask,
            "completion_mask": batch.completion_mask,
        }
        if self.with_signals:
            assert batch.signals is not None
            inputs |= {"hidden": batch.signals.hidden, "logsumexp": batch.signals.logsumexp}
        if self.reference is not None:
            inputs["reference"] = torch.cat([self.reference[index] for index in row["samples"]])
        return inputs
