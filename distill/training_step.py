"""A training step: the batch of a row of the plan, and the loss inside the model's forward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from data.records import collate, pack
from distill.choice import most_learnable
from distill.chunked import chunked_loss
from distill.heads import TargetRows, TopKRows
from distill.loss_config import LossName
from evaluation.decoder.heads import HeadModel
from evaluation.signals import completion_states

if TYPE_CHECKING:
    from distill.trainer import Run


class Collator:
    """Turns one row of the plan into the tensors of one batch."""

    def __init__(self, run: Run) -> None:
        self.samples, self.pad_id, self.reference = run.train, run.target.pad_id, run.reference
        self.make = pack if run.config.packing else collate
        # Medusa's heads read the kept states also where the loss does not.
        asked = run.config.loss.names != {"cross_entropy"} or isinstance(run.drafter.model, HeadModel)
        self.with_signals = run.config.signal != "live" and asked

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        (row,) = rows
        batch = self.make(self.samples, row["samples"] or [0], self.pad_id)
        if not row["samples"]:  # fewer samples than processes: this one goes along without a token
            batch = batch.without_tokens()
        inputs = {
            "input_ids": batch.input_ids,
            "attention_mask": batch.attention_mask,
            "completion_mask": batch.completion_mask,
        }
        if batch.position_ids is not None:
            inputs["position_ids"] = batch.position_ids
        if self.with_signals:
            assert batch.signals is not None
            inputs |= batch.signals.tensors()
        if self.reference is not None and row["samples"]:
            inputs["reference"] = torch.cat([self.reference[index] for index in row["samples"]])
        return inputs


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
    position_ids: Tensor | None = None,
    hidden: Tensor | None = None,
    logsumexp: Tensor | None = None,
    ids: Tensor | None = None,
    log_probs: Tensor | None = None,
    tail: Tensor | None = None,
    reference: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """Summed loss over the batch's completion tokens (or the chosen share of them) and, detached, their
    summed acceptance.

    `rows` maps target ids to rows of the draft head, `None` where they are the same.
    """
    states = completion_states(model, input_ids, completion_mask, position_ids)
    if len(states) == 0:  # every parameter takes part, as DDP expects
        nothing = 0 * (states.sum() + model.get_output_embeddings().weight.sum())
        return nothing, nothing.detach()
    target: TargetRows | TopKRows | None = None
    labels = None
    if name == "cross_entropy":
        chosen = input_ids[:, 1:][completion_mask[:, 1:]]
        labels = chosen if rows is None else rows[chosen]
    elif ids is not None:
        assert log_probs is not None and tail is not None
        target = TopKRows(ids.long() if rows is None else rows[ids.long()], log_probs, tail)
    else:
        assert hidden is not None and (logsumexp is not None or rows is None)
        target = TargetRows(hidden.to(target_head.dtype), target_head, logsumexp)
    head = model.get_output_embeddings().weight
    if share is not None and reference is not None and target is not None:
        states, target = most_learnable(
            states, head.detach(), target, reference, temperature=temperature, share=share
        )
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
