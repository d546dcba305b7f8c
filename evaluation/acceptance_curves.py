"""Where a drafter is accepted: by position in a drafted block, by position in the answer, and by how open the
target's choice is. All from the teacher-forced table of `evaluation.acceptance`.

Shapes: M completion tokens of all samples, n of one sample, V ids, H the target's hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from data.records import collate
from data.signals import Signals
from evaluation.acceptance import MEASURES, AcceptanceTable, bootstrap_ratio, prompt_numbers
from evaluation.head import Head, as_head, row_blocks

if TYPE_CHECKING:
    from data.records import Batch, Samples

POSITION_EDGES = (0, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1 << 30)
ENTROPY_EDGES = (0.0, 0.05, 0.2, 0.5, 1.0, 2.0, float("inf"))
"""In nats: 0.05 is a token that is all but certain, 2 one of seven equally likely ones."""


@torch.no_grad()
def target_entropy(
    target_head: Head | Tensor,
    samples: Samples,
    temperature: float,
    live: Callable[[Batch], Signals] | None = None,
) -> list[np.ndarray]:
    """Entropy in nats of the target's distribution at `temperature` at each completion token, float64 `[n]`
    per sample, from the cached states (`live` computes them where there are none) and the target's full head.
    """
    found = []
    head = as_head(target_head)
    weight = head.weight_VH
    for index in range(len(samples)):
        signals = samples.signals(index) if live is None else live(collate(samples, [index], pad_id=0))
        assert isinstance(signals, Signals)
        parts = []
        for block in row_blocks(len(signals.hidden), len(head)):
            hidden = signals.hidden[block].to(device=weight.device, dtype=weight.dtype)
            log_probs = (head.logits(hidden) / temperature).log_softmax(-1)
            parts.append(-(log_probs.exp() * log_probs).sum(-1).double().cpu())
        found.append(torch.cat(parts).numpy())
    return found


def curves(
    tables: Sequence[AcceptanceTable],
    samples: Samples,
    entropy: Sequence[np.ndarray],
    count: int,
    *,
    seed: int,
) -> list[dict[str, Any]]:
    """Rows with `split`, `temperature`, `by` ("block", "answer" or "entropy"), `bin`, `tokens`, `samples`,
    and each measure with its 95 % bootstrap interval over prompts.

    `tables`: one per position in a draft, as `by_position` gives them; the last one goes for all after it.
    By block: acceptance at position i of up to `count` drafts, given that all before it were accepted, over
    blocks that start at every token. Exact for greedy decoding; for sampled drafts it takes the text to be
    the target's own also where drafts were accepted.
    """
    by_step = [_by_sample(table, len(samples)) for table in tables]
    values = by_step[0]
    groups: dict[tuple[str, float], list[int]] = {}
    for index, record in enumerate(samples):
        if len(values[index]["greedy"]):
            split = "seen" if record.seen_template else "unseen"
            groups.setdefault((split, record.temperature), []).append(index)
    rows = []
    for (split, temperature), members in sorted(groups.items()):
        owner = prompt_numbers(samples, members)
        for by, bins in (
            ("block", _blocks(members, by_step, count)),
            ("answer", _bins(members, values, _places(values), POSITION_EDGES)),
            ("entropy", _bins(members, values, entropy, ENTROPY_EDGES)),
        ):
            for label, tokens, sums in bins:
                row = {"split": split, "temperature": temperature, "by": by, "bin": label, "tokens": tokens}
                row["samples"] = max(int((weights > 0).sum()) for _, weights in sums.values())
                for name, own in sums.items():
                    totals, weights = (np.bincount(owner, part) for part in own)
                    there = weights > 0
                    interval = (
                        bootstrap_ratio(totals[there], weights[there], seed=seed) if there.any() else None
                    )
                    row[name] = interval
                rows.append(row)
    return rows


Bin = tuple[str, int, dict[str, tuple[np.ndarray, np.ndarray]]]
"""Label, tokens, and per measure the accepted weight and the weight of each sample."""


def _by_sample(table: AcceptanceTable, count: int) -> list[dict[str, np.ndarray]]:
    """Each sample's values in the order of its tokens, float64 `[n]` by measure."""
    order = torch.argsort(table.sample, stable=True)
    sizes = torch.bincount(table.sample, minlength=count).tolist()
    columns = {name: getattr(table, name)[order].double().split(sizes) for name in MEASURES}
    return [{name: columns[name][index].numpy() for name in MEASURES} for index in range(count)]


def _places(values: Sequence[dict[str, np.ndarray]]) -> list[np.ndarray]:
    return [np.arange(len(own["greedy"]), dtype=float) for own in values]


def _blocks(
    members: Sequence[int], by_step: Sequence[Sequence[dict[str, np.ndarray]]], count: int
) -> Iterator[Bin]:
    values = by_step[0]
    reach = {name: [np.ones(len(values[index][name])) for index in members] for name in MEASURES}
    for position in range(count):
        tokens, sums = 0, {}
        values = by_step[min(position, len(by_step) - 1)]
        for name in MEASURES:
            totals, weights = np.zeros(len(members)), np.zeros(len(members))
            for slot, index in enumerate(members):
                own = values[index][name][position:]
                weight = reach[name][slot][: len(own)]
                totals[slot], weights[slot] = (weight * own).sum(), weight.sum()
                reach[name][slot] = weight * own
            tokens = sum(max(0, len(values[index][name]) - position) for index in members)
            sums[name] = (totals, weights)
        if tokens:
            yield str(position + 1), tokens, sums


def _bins(
    members: Sequence[int],
    values: Sequence[dict[str, np.ndarray]],
    of: Sequence[np.ndarray],
    edges: Sequence[float],
) -> Iterator[Bin]:
    """Bins of a quantity `of` each token; empty ones are left out."""
    for low, high in pairwise(edges):
        inside = [(of[index] >= low) & (of[index] < high) for index in members]
        tokens = int(sum(mask.sum() for mask in inside))
        if tokens:
            weights = np.array([float(mask.sum()) for mask in inside])
            sums = {
                name: (
                    np.array([values[i][name][mask].sum() for i, mask in zip(members, inside, strict=True)]),
                    weights,
                )
                for name in MEASURES
            }
            yield _label(low, high), tokens, sums


def _label(low: float, high: float) -> str:
    return f"{low:g}+" if high >= 1 << 30 else f"{low:g}-{high:g}"
