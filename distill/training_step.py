"""One batch of training: from samples to tensors, and from tensors to the summed loss inside the model's
forward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from data.records import collate, pack
from distill.chunked import chunked_loss
from distill.data_selection import most_learnable, token_kl
from distill.heads import TargetRows, TopKRows, target_rows
from distill.loss_config import LossName
from evaluation.decoder.heads import HeadModel
from evaluation.head import Head, head_of
from evaluation.signals import completion_states

if TYPE_CHECKING:
    from distill.trainer import TrainingRun


class Collator:
    """Turns one row of the plan into the tensors of one batch."""

    def __init__(self, run: TrainingRun) -> None:
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
        if self.reference is not None:
            own = [self.reference[index] for index in row["samples"]]
            inputs["reference"] = torch.cat(own) if own else torch.empty(0)
        return inputs


def loss_forward(
    model: PreTrainedModel,
    *,
    name: LossName,
    eta: float,
    beta: float,
    temperature: float,
    share: float | None,
    target_head: Head,
    rows: Tensor | None,
    input_ids: Tensor,
    completion_mask: Tensor,
    position_ids: Tensor | None = None,
    reference: Tensor | None = None,
    **told: Any,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Summed loss over the batch's completion tokens (or those chosen of them), their summed acceptance,
    detached, and their number.

    `told`: the target's signals by their names. `rows` maps target ids to rows of the draft head, `None`
    where they are the same.
    """
    states = completion_states(model, input_ids, completion_mask, position_ids)
    target: TargetRows | TopKRows | None = None
    labels = None
    if name == "cross_entropy":
        ids = input_ids[:, 1:][completion_mask[:, 1:]]
        labels = ids if rows is None else rows[ids]
    else:
        target = target_rows(told, target_head, rows)
    head = head_of(model)
    if share is not None and reference is not None and target is not None:
        gap = token_kl(states.detach(), head.detached(), target, temperature) - reference
        chosen = most_learnable(gap, share)
        states, target = states[chosen], target.take(chosen)
    count = torch.tensor(len(states), device=states.device)
    if len(states) == 0:  # every parameter takes part, as DDP expects
        nothing = 0 * (states.sum() + sum(part.sum() for part in head.parts()))
        return nothing, nothing.detach(), count
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
    return sums.loss, sums.acceptance, count
