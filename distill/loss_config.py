"""Which loss a recipe trains with, and when: names and settings alone, so that reading a recipe loads no
torch.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

LossName = Literal[
    "forward_kl",
    "reverse_kl",
    "jsd",
    "tvd",
    "tvd_pp",
    "neg_log_acceptance",
    "lk_hybrid",
    "argmax",
    "cross_entropy",
]
"""The menu; formulas, sources and what each has to do with acceptance stand in `distill.losses`."""


class WarmStart(BaseModel):
    """Another loss for the first part of training: TVD and its like hardly move a drafter that is far off."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: LossName = "forward_kl"
    share: float = Field(default=0.5, gt=0, lt=1)
    """Of the steps."""


class LossConfig(BaseModel):
    """What training minimises."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: LossName = "forward_kl"
    eta: float = Field(default=3.0, ge=0)
    """`lk_hybrid` only: how fast the mix moves from forward KL to TVD as acceptance rises."""
    beta: float = Field(default=0.5, gt=0, lt=1)
    """`jsd` only: near 0 it behaves like forward KL, near 1 like reverse KL."""
    warm_start: WarmStart | None = None
    """Train with that loss first, then with `name`."""

    def at(self, step: int, steps: int) -> LossName:
        """The loss of `step` (counted from 0) out of `steps`."""
        if self.warm_start is not None and step < self.warm_start.share * steps:
            return self.warm_start.name
        return self.name

    @property
    def names(self) -> set[LossName]:
        """Every loss that training uses at some step."""
        return {self.name} if self.warm_start is None else {self.name, self.warm_start.name}
