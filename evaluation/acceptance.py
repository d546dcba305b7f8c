"""The three acceptances of a drafter, measured teacher-forced on the target's own text.

At each completion position, with p the target's and q the draft's distribution at the temperature:

- `sampled`: sum over ids of min(p, q) = 1 - TVD, what rejection sampling accepts of a sampled draft;
- `argmax`: p(argmax q), what it accepts of a draft chosen by argmax;
- `greedy`: 1 where the two argmaxes agree, what decoding at temperature 0 accepts.

With a reduced draft vocabulary q is 0 elsewhere and p stays the true probability, so uncovered mass counts as
rejected. Shapes: M completion tokens of all samples, N of one batch, S samples, Vd draft ids, H the target's
hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from evaluation.signals import completion_states

if TYPE_CHECKING:
    from data.records import Batch, SampleRecord, Samples, Signals
    from evaluation.decoder.drafters import DraftModel

MEASURES = ("sampled", "argmax", "greedy")
_BLOCK_ELEMENTS = 1 << 24  # of one [rows, Vd] block of probabilities
_RESAMPLES = 2000


@dataclass(frozen=True)
class AcceptanceTable:
    """The acceptances of M tokens, and which sample each belongs to; all on the CPU."""

    sampled: Tensor
    """float32 [M]."""
    argmax: Tensor
    """float32 [M]."""
    greedy: Tensor
    """float32 [M], 0 or 1."""
    sample: Tensor
    """int64 [M], an index into the samples given."""

    def means(self) -> dict[str, float]:
        """The mean over all tokens of each measure, by its name."""
        return {name: float(getattr(self, name).double().mean()) for name in MEASURES}


@torch.no_grad()
def teacher_forced(
    drafter: DraftModel,
    target_head: Tensor,
    samples: Samples,
    *,
    temperature: float,
    batch_size: int,
    signals: Callable[[Batch], Signals] | None = None,
) -> AcceptanceTable:
    """One drafter pass over `samples`: three acceptances per completion token.

    Args:
        target_head: the target's full head [V, H], any floating dtype. temperature: > 0, divides both models'
        logits in `sampled` and `argmax`; the cached signals must be of it. batch_size: samples per forward
        pass; samples of like length go together. signals: computes a batch's signals where the samples carry
        none (see `evaluation.signals`).

    Raises `ValueError` when there is no completion token.
    """
    from data.records import collate
    from data.signals import Signals

    assert temperature > 0
    model = drafter.model
    training = model.training
    model.eval()
    device = model.device
    head = target_head if drafter.vocab is None else target_head[drafter.vocab.to(target_head.device)]
    head = head.to(device)
    order = sorted(range(len(samples)), key=lambda index: len(samples[index].input_ids))
    parts: list[tuple[Tensor, ...]] = []
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        batch = collate(samples, chosen, pad_id=0)
        mask = batch.completion_mask.to(device)
        hidden = completion_states(model, batch.input_ids.to(device), mask)
        told = signals(batch) if signals is not None else batch.signals
        if not isinstance(told, Signals):
            raise ValueError("These samples carry no target signals; sample with signals or give `signals`.")
        owner = torch.tensor(chosen).repeat_interleave(batch.completion_mask[:, 1:].sum(-1))
        parts.append((*_three(drafter, hidden, head, told, temperature), owner))
    model.train(training)
    if sum(len(part[-1]) for part in parts) == 0:
        raise ValueError("There is no completion token to measure acceptance on.")
    return AcceptanceTable(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _three(
    drafter: DraftModel, draft_hidden: Tensor, head: Tensor, signals: Signals, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The acceptances of N tokens, a block of rows at a time."""
    device = draft_hidden.device
    draft_head = drafter.model.get_output_embeddings().weight
    target_hidden = signals.hidden.to(device=device, dtype=head.dtype)
    logsumexp, target_argmax = signals.logsumexp.to(device), signals.argmax.to(device)
    result = torch.empty(3, len(draft_hidden))
    rows = max(1, _BLOCK_ELEMENTS // len(head))
    for start in range(0, len(draft_hidden), rows):
        block = slice(start, start + rows)
        draft_logits = _wide(draft_hidden[block].to(draft_head.dtype) @ draft_head.T)
        target_logits = _wide(target_hidden[block] @ head.T)
        target_probs = (target_logits / temperature - logsumexp[block, None]).exp_()
        draft_probs = (draft_logits / temperature).softmax(-1)
        top = draft_logits.argmax(-1)
        top_id = top if drafter.vocab is None else drafter.vocab.to(device)[top]
        result[0, block] = torch.minimum(target_probs, draft_probs).sum(-1).cpu()
        result[1, block] = target_probs.gather(-1, top[:, None]).squeeze(-1).cpu()
        result[2, block] = (top_id == target_argmax[block]).cpu()
    # Rounding may lift a sum of probabilities a hair over 1
    return tuple(result.clamp_(max=1).unbind(0))  # type: ignore[return-value]


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def summarise(table: AcceptanceTable, samples: Sequence[SampleRecord], *, seed: int) -> list[dict[str, Any]]:
    """The `acceptance` rows of `evaluation.json`: by seen or unseen template, sampling temperature, and task.

    Each row has `split` ("seen" or "unseen"), `task` ("all" or one task), `temperature` (that of sampling),
    `tokens`, `samples`, and per measure `mean` over tokens with `low` and `high`: a percentile bootstrap
    interval of 95 % over samples, since tokens of one text are not independent.
    """
    count = len(samples)
    tokens_S = torch.bincount(table.sample, minlength=count).double().numpy()
    sums_S = {
        name: torch.bincount(table.sample, weights=getattr(table, name).double(), minlength=count).numpy()
        for name in MEASURES
    }
    groups: dict[tuple[str, float, str], list[int]] = {}
    for index, record in enumerate(samples):
        if tokens_S[index] == 0:
            continue
        split = "seen" if record.seen_template else "unseen"
        for task in ("all", record.task):
            groups.setdefault((split, record.temperature, task), []).append(index)
    rows = []
    for key in sorted(groups, key=lambda key: (key[0], key[1], key[2] != "all", key[2])):
        split, temperature, task = key
        members = np.array(groups[key])
        intervals = {
            name: bootstrap_ratio(sums_S[name][members], tokens_S[members], seed=seed) for name in MEASURES
        }
        rows.append(
            {
                "split": split,
                "task": task,
                "temperature": temperature,
                "tokens": int(tokens_S[members].sum()),
                "samples": len(members),
                **intervals,
            }
        )
    return rows


def bootstrap_ratio(totals: np.ndarray, counts: np.ndarray, *, seed: int) -> dict[str, float]:
    """`sum(totals) / sum(counts)` with a 95 % percentile bootstrap interval over the entries (float64 [S]
    each).

    The same seed and entries give the same interval; a single entry gives one of no width.
    """
    entries = len(totals)
    drawn = np.random.default_rng(seed).integers(entries, size=(_RESAMPLES, entries))
    low, high = np.percentile(totals[drawn].sum(1) / counts[drawn].sum(1), [2.5, 97.5])
    return {"mean": float(totals.sum() / counts.sum()), "low": float(low), "high": float(high)}
