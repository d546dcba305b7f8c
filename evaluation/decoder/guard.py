"""Speculation that does not pay is switched off, and tried again now and then.

Whether the next round drafts depends on what earlier rounds emitted, never on the token that comes next: the
guard changes speed, not the distribution.
"""

from __future__ import annotations

from collections.abc import Sequence

from data.errors import UserError

DEBT = 4.0  # target steps that a drafter may lose before it is paused
PROBE_DEBT = 1.0  # and what it may lose when it is tried again
SHORTEST_PAUSE, LONGEST_PAUSE = 16, 256  # rounds


class Guard:
    """Weighs what drafting has won against what it has cost, both in plain steps of the target.

    A round that emits n tokens per row saves n plain steps and costs `costs[steps]`. The balance of the two
    starts at `DEBT` and holds at most twice that, so that a drafter which was good long ago gets no credit.
    Below 0 drafting pauses; each pause is twice as long as the one before, until a trial has earned `DEBT`.

    What a drafter reads after a pause to catch up is not weighed: it is owed to the pause, not to the drafts,
    and charging it to a trial would keep a drafter out that has become good. It grows with the pause, so it
    is the same share of plain steps whatever the pauses are.

    The balance outlives a generation: a bad drafter is found out once. So with a guard sampled tokens depend
    on what was decoded before, though their distribution does not.
    """

    def __init__(self, costs: Sequence[float], overheads: Sequence[float] = ()) -> None:
        """`costs[k]`: a round with k drafts over a plain step, both measured at the batch size in use;
        `costs[0]` is 1. `overheads[n]`: what checking n tokens adds to a step, for trees, which check more
        than they took draft steps.
        """
        if not costs or abs(costs[0] - 1) > 1e-9 or any(cost <= 0 for cost in costs):
            raise UserError(
                f"round costs are {list(costs)}; give positive ones, in plain steps, 1 for no draft."
            )
        self.costs, self.overheads = list(costs), list(overheads)
        self.balance = DEBT
        self.pause = SHORTEST_PAUSE
        self.left = 0

    @property
    def drafts(self) -> bool:
        """Whether the next round should draft."""
        return self.left == 0

    def cost(self, steps: int, siblings: int) -> float:
        wider = self.overheads[steps + siblings] - self.overheads[steps] if siblings else 0.0
        return self.costs[steps] + wider

    def record(self, steps: int, siblings: int, emitted: float) -> None:
        """A round of `steps` draft steps and `siblings` columns beside them emitted so many tokens per row on
        average.
        """
        if not self.drafts:
            self.left -= 1
            return
        self.balance = min(self.balance + emitted - self.cost(steps, siblings), 2 * DEBT)
        if self.balance < 0:
            self.left, self.pause = self.pause, min(2 * self.pause, LONGEST_PAUSE)
            self.balance = PROBE_DEBT
        elif self.balance >= DEBT:
            self.pause = SHORTEST_PAUSE
