"""The three acceptances of a drafter, measured teacher-forced on the target's own text.

At each completion position, with p the target's and q the draft's distribution at the temperature:

- `sampled`: sum over ids of min(p, q) = 1 - TVD, what rejection sampling accepts of a sampled draft;
- `argmax`: p(argmax q), what it accepts of a draft chosen by argmax;
- `greedy`: 1 where the two argmaxes agree, what decoding at temperature 0 accepts.

A head on the target (`evaluation.decoder.heads`) has a distribution of its own for each drafted token, so it
has a table per position in a draft; a model's is the same at all of them.

With a reduced draft vocabulary q is 0 elsewhere and p stays the true probability, so uncovered mass counts as
rejected. Shapes: M completion tokens of all samples, N of one batch, S samples, Vd draft ids, H the target's
hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from data.signals import Signals
from evaluation.decoder.heads import HeadModel, drafts, read_text
from evaluation.head import Head, as_head, head_of, row_blocks
from evaluation.signals import completion_states

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from data.records import Batch, SampleRecord, Samples
    from evaluation.decoder.drafters import DraftModel

MEASURES = ("sampled", "argmax", "greedy")
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
    target_head: Head | Tensor,
    samples: Samples,
    *,
    temperature: float,
    batch_size: int,
    signals: Callable[[Batch], Signals] | None = None,
    target: PreTrainedModel | None = None,
) -> AcceptanceTable:
    """One drafter pass over `samples`: three acceptances per completion token, as the first one of a draft.

    Args:
        target_head: the target's full head (its weight [V, H], where that is all), any floating dtype.
        temperature: > 0, divides both models' logits in `sampled` and `argmax`; the cached signals must be of
        it. batch_size: samples per forward pass; samples of like length go together. signals: computes a
        batch's signals where the samples carry none (see `evaluation.signals`). target: required where the
        drafter is a head on it.

    Raises `ValueError` when there is no completion token.
    """
    settings = {"temperature": temperature, "batch_size": batch_size, "signals": signals, "target": target}
    return by_position(drafter, target_head, samples, **settings)[0]  # type: ignore[arg-type]


@torch.no_grad()
def by_position(
    drafter: DraftModel,
    target_head: Head | Tensor,
    samples: Samples,
    *,
    temperature: float,
    batch_size: int,
    signals: Callable[[Batch], Signals] | None = None,
    target: PreTrainedModel | None = None,
) -> list[AcceptanceTable]:
    """The table of each position in a draft, one for a drafter that is a model; see `teacher_forced`.

    Number k's acceptance at a token is that of the k-th drafted token, when drafting began k tokens before
    and everything since stood. A token that no draft reaches, at the start of a text, counts as not accepted.
    """
    from data.records import collate
    from data.signals import Signals

    assert temperature > 0
    model = drafter.model
    training = model.training
    model.eval()
    device = model.device
    head = as_head(target_head).rows(drafter.vocab).to(device)
    order = sorted(range(len(samples)), key=lambda index: len(samples[index].input_ids))
    parts: list[list[Tensor]] = []
    owners = []
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        batch = collate(samples, chosen, pad_id=0)
        told = signals(batch) if signals is not None else batch.signals
        if not isinstance(told, Signals):
            raise ValueError("These samples carry no target signals; sample with signals or give `signals`.")
        parts.append(list(_positions(drafter, target, head, batch, told, temperature)))
        owners.append(torch.tensor(chosen).repeat_interleave(batch.completion_mask[:, 1:].sum(-1)))
    model.train(training)
    if sum(map(len, owners)) == 0:
        raise ValueError("There is no completion token to measure acceptance on.")
    owner = torch.cat(owners)
    tables = [torch.cat(position, dim=1) for position in zip(*parts, strict=True)]
    return [AcceptanceTable(sampled, argmax, greedy, owner) for sampled, argmax, greedy in tables]


def _positions(
    drafter: DraftModel,
    target: PreTrainedModel | None,
    head: Head,
    batch: Batch,
    told: Signals,
    temperature: float,
) -> Iterator[Tensor]:
    """The acceptances float32 [3, N] of a batch's completion tokens at each position in a draft."""
    model = drafter.model
    input_ids, mask = batch.input_ids.to(model.device), batch.completion_mask.to(model.device)
    if not isinstance(model, HeadModel):
        states = completion_states(model, input_ids, mask)
        yield _three(states, head_of(model), drafter.vocab, head, told, temperature)
        return
    assert target is not None, "a head on the target needs the target"
    text, _ = read_text(target, model, input_ids)
    for step, drafted in enumerate(drafts(model, text, mask)):
        own = Head(model.head(step).weight)
        kept = drafted.kept.to(told.hidden.device)
        reached = Signals(told.hidden[kept], told.logsumexp[kept], told.argmax[kept])
        found = torch.zeros(3, len(drafted.kept))
        found[:, drafted.kept.cpu()] = _three(drafted.states, own, drafter.vocab, head, reached, temperature)
        yield found


@torch.no_grad()
def rank_rates(
    drafter: DraftModel,
    target: PreTrainedModel,
    samples: Samples,
    ranks: int,
    *,
    temperature: float,
    batch_size: int,
    signals: Callable[[Batch], Signals] | None = None,
) -> list[list[float]]:
    """How often the token of each rank is right at each position in a draft of a head on `target`, over
    finished text, as `S` lists of `ranks` rates: at temperature 0 how often it is the target's choice, else
    how likely the target finds it.
    """
    from data.records import collate

    model = drafter.model
    assert isinstance(model, HeadModel)
    head = head_of(target)
    assert head.plain, "heads are put on targets with plain logits alone"
    rates: dict[int, list[Tensor]] = {}
    for start in range(0, len(samples), batch_size):
        batch = collate(samples, range(start, min(start + batch_size, len(samples))), pad_id=0)
        told: Any = signals(batch) if signals is not None else batch.signals
        mask = batch.completion_mask.to(model.device)
        text, _ = read_text(target, model, batch.input_ids.to(model.device))
        for step, drafted in enumerate(drafts(model, text, mask)):
            index = model.head(step)(drafted.states).topk(ranks).indices
            ids = index if drafter.vocab is None else drafter.vocab.to(index.device)[index]
            kept = drafted.kept.to(told.hidden.device)
            if temperature == 0:
                right = (ids == told.argmax[kept].to(ids.device)[:, None]).double()
            else:
                weight_nRH = head.weight_VH[ids]
                hidden, normaliser = told.hidden[kept].to(weight_nRH), told.logsumexp[kept].to(ids.device)
                logits = (weight_nRH @ hidden[..., None])[..., 0].float()
                right = (logits / temperature - normaliser[:, None]).exp().double()
            rates.setdefault(step, []).append(right)
    means = [torch.cat(parts).mean(dim=0).nan_to_num(0) for _, parts in sorted(rates.items())]
    return [row.tolist() for row in means]


def accepted_drafts(tables: Sequence[AcceptanceTable], measure: str) -> float:
    """Accepted drafts of a round on average over all tokens that it might begin at, by `measure`: sum over i
    of the product of the first i acceptances. Exact for `greedy`.
    """
    owner = tables[0].sample
    reach = torch.ones(len(owner), dtype=torch.float64)
    total = torch.zeros_like(reach)
    for step, table in enumerate(tables):
        values = torch.zeros_like(reach)
        end = len(owner) - step
        inside = owner[step:] == owner[:end]  # behind a text's end nothing is drafted
        values[:end] = torch.where(inside, getattr(table, measure)[step:].double(), 0)
        reach = reach * values
        total = total + reach
    return float(total.mean())


def _three(
    draft_hidden: Tensor,
    draft_head: Head,
    vocab: Tensor | None,
    head: Head,
    signals: Signals,
    temperature: float,
) -> Tensor:
    """The acceptances float32 [3, N] of N tokens, a block of rows at a time."""
    device = draft_hidden.device
    target_hidden = signals.hidden.to(device=device, dtype=head.weight_VH.dtype)
    logsumexp, target_argmax = signals.logsumexp.to(device), signals.argmax.to(device)
    result = torch.empty(3, len(draft_hidden))
    for block in row_blocks(len(draft_hidden), len(head)):
        draft_logits = _wide(draft_head, draft_hidden[block].to(draft_head.weight_VH.dtype))
        target_logits = _wide(head, target_hidden[block])
        target_probs = (target_logits / temperature - logsumexp[block, None]).exp_()
        draft_probs = (draft_logits / temperature).softmax(-1)
        top = draft_logits.argmax(-1)
        top_id = top if vocab is None else vocab.to(device)[top]
        result[0, block] = torch.minimum(target_probs, draft_probs).sum(-1).cpu()
        result[1, block] = target_probs.gather(-1, top[:, None]).squeeze(-1).cpu()
        result[2, block] = (top_id == target_argmax[block]).cpu()
    # Rounding may lift a sum of probabilities a hair over 1
    return result.clamp_(max=1)


def _wide(head: Head, hidden: Tensor) -> Tensor:
    return head.logits(hidden, torch.promote_types(hidden.dtype, torch.float32))


def summarise(table: AcceptanceTable, samples: Sequence[SampleRecord], *, seed: int) -> list[dict[str, Any]]:
    """The `acceptance` rows of `evaluation.json`: by seen or unseen template, sampling temperature, and task.

    Each row has `split` ("seen" or "unseen"), `task` ("all" or one task), `temperature` (that of sampling),
    `tokens`, `samples`, and per measure `mean` over tokens with `low` and `high`: a percentile bootstrap
    interval of 95 % over prompts, since neither the tokens of a text nor the answers to a prompt are
    independent.
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
        owner = prompt_numbers(samples, groups[key])
        intervals = {
            name: bootstrap_ratio(
                np.bincount(owner, sums_S[name][members]), np.bincount(owner, tokens_S[members]), seed=seed
            )
            for name in MEASURES
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


def prompt_numbers(samples: Sequence[SampleRecord], members: Sequence[int]) -> np.ndarray:
    """For each of the samples `members` the number of its prompt among them, int64, counted from 0."""
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(samples[index].prompt_id, len(numbers)) for index in members])


def bootstrap_ratio(totals: np.ndarray, counts: np.ndarray, *, seed: int) -> dict[str, float]:
    """`sum(totals) / sum(counts)` with a 95 % percentile bootstrap interval over the entries (float64 [S]
    each).

    The same seed and entries give the same interval; a single entry gives one of no width.
    """
    entries = len(totals)
    drawn = np.random.default_rng(seed).integers(entries, size=(_RESAMPLES, entries))
    low, high = np.percentile(totals[drawn].sum(1) / counts[drawn].sum(1), [2.5, 97.5])
    return {"mean": float(totals.sum() / counts.sum()), "low": float(low), "high": float(high)}
