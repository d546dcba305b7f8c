"""What training asks of heads on the target: the losses of `distill.losses` at every position of a draft.

The loss of a batch is the mean over positions, number k of them weighted with 0.8^k (Medusa's and EAGLE-3's
own choice: a draft is worth what its first tokens are), of the loss summed over completion tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from distill.chunked import chunked_loss
from distill.heads import TargetRows
from distill.loss_config import LossName
from evaluation.decoder.heads import HeadModel, Text, cached_text, drafts, read_text, text_of_features
from evaluation.head import Head
from evaluation.signals import signals_of_states

POSITION_DECAY = 0.8


def head_inputs(
    target: PreTrainedModel,
    model: HeadModel,
    inputs: Mapping[str, Tensor],
    temperature: float,
    need_signals: bool,
) -> dict[str, Tensor | None]:
    """What `head_forward` reads beside the batch: `embeddings`, `features`, `known`, and the target's signals
    where they are needed and sampling kept none.

    Heads train on what sampling kept, without a forward of the target. Where that is the last hidden state
    alone, the target reads the text for EAGLE's other layers.
    """
    input_ids, mask = inputs["input_ids"], inputs["completion_mask"]
    if "features" in inputs:
        return _fields(text_of_features(target, input_ids, inputs["attention_mask"], inputs["features"]))
    if "hidden" in inputs and not model.feature_layers:
        return _fields(cached_text(target, input_ids, mask, inputs["hidden"]))
    text, last = read_text(target, model, input_ids)
    if "hidden" in inputs or not need_signals:
        return _fields(text)
    told = signals_of_states(target, last[:, :-1][mask[:, 1:]], temperature)
    return {**_fields(text), "hidden": told.hidden, "logsumexp": told.logsumexp}


def _fields(text: Text) -> dict[str, Tensor | None]:
    return {"embeddings": text.embeddings, "features": text.features, "known": text.known}


def head_forward(
    model: HeadModel,
    *,
    name: LossName,
    eta: float,
    beta: float,
    temperature: float,
    target_head: Head,
    rows: Tensor | None,
    input_ids: Tensor,
    completion_mask: Tensor,
    embeddings: Tensor,
    features: Tensor,
    known: Tensor | None,
    hidden: Tensor | None = None,
    logsumexp: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Summed loss over the batch's completion tokens, the summed acceptance of the first drafted token,
    detached, and how many tokens there are.

    `rows` maps target ids to rows of the draft head, `None` where they are the same.
    """
    labels = input_ids[:, 1:][completion_mask[:, 1:]]
    labels = labels if rows is None else rows[labels]
    # Every parameter takes part, as DDP expects, also those of positions that this batch does not reach.
    nothing = 0 * sum(weight.sum() for weight in model.parameters())
    total, weights = nothing, 0.0
    overlap: Tensor | None = torch.zeros((), device=features.device)
    for step, drafted in enumerate(drafts(model, Text(embeddings, features, known), completion_mask)):
        if not len(drafted.states):
            break  # no answer of this batch is so long, or it has none
        kept = drafted.kept
        told = None
        if name != "cross_entropy":
            assert hidden is not None and logsumexp is not None
            told = TargetRows(hidden[kept].to(target_head.weight_VH.dtype), target_head, logsumexp[kept])
        sums = chunked_loss(
            name,
            drafted.states,
            model.head(step).weight,
            target=told,
            labels_N=labels[kept],
            temperature=temperature,
            eta=eta,
            beta=beta,
        )
        weight = POSITION_DECAY**step
        total, weights = total + weight * sums.loss, weights + weight
        overlap = sums.acceptance if step == 0 else overlap
    return total / max(weights, 1.0), overlap, completion_mask[:, 1:].sum()
