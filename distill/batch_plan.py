"""Which samples make which batch of a training, decided before its first step."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

_WINDOW_BATCHES = 16  # batches' worth of shuffled samples that are sorted by length, against padding


@dataclass(frozen=True)
class BatchPlan:
    """Which samples make which batch, in order; each a list of indices into the training samples."""

    batches: list[list[int]]
    tokens: list[int]
    """Completion tokens of each batch."""
    batches_per_step: int
    """As many as are accumulated."""

    @property
    def steps(self) -> int:
        return len(self.batches) // self.batches_per_step

    def tokens_after(self, step: int) -> int:
        """Completion tokens trained on when `step` steps are done."""
        return sum(self.tokens[: step * self.batches_per_step])

    def shares(self, processes: int) -> list[list[int]]:
        """Each batch dealt out to `processes` processes, batch after batch; a small batch leaves some empty.

        So what is trained does not depend on how many processes there are.
        """
        return [batch[process::processes] for batch in self.batches for process in range(processes)]


def plan_batches(
    sizes: Sequence[tuple[int, int]],
    *,
    batch_size: int,
    tokens: int,
    accumulation: int,
    seed: int,
) -> BatchPlan:
    """Batches until `tokens` completion tokens are reached, a whole number of steps.

    Each epoch shuffles all samples, sorts windows of 16 batches by length and shuffles the batches: rows of
    one batch have like lengths, so little is computed on padding. `sizes` holds (length, completion tokens)
    of each sample. The same arguments always give the same plan.
    """
    assert sizes and all(completion > 0 for _, completion in sizes)
    generator = random.Random(seed)
    window = batch_size * _WINDOW_BATCHES
    plan = BatchPlan([], [], accumulation)
    planned = 0
    while True:
        order = list(range(len(sizes)))
        generator.shuffle(order)
        epoch: list[list[int]] = []
        for start in range(0, len(order), window):
            near = sorted(order[start : start + window], key=lambda index: sizes[index][0])
            epoch += [near[first : first + batch_size] for first in range(0, len(near), batch_size)]
        generator.shuffle(epoch)
        for batch in epoch:
            plan.batches.append(batch)
            plan.tokens.append(sum(sizes[index][1] for index in batch))
            planned += plan.tokens[-1]
            if planned >= tokens and len(plan.batches) % accumulation == 0:
                return plan
