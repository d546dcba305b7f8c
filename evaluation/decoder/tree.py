"""Trees of draft tokens: several guesses for one position, all checked by one forward of the target.

The forward reads a row's last emitted token, the root, in column 0 and node j in column j + 1. A node sees
the text so far, its ancestors and itself, and stands at the position of its depth.

Shapes: B rows, N nodes, T = N + 1 columns, V target vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from evaluation.decoder.drafters import Draft


@dataclass
class DraftTree(Draft):
    """Proposed tokens as a tree: node j is `ids[:, j]`, and row b proposes its first `proposed[b]` nodes.

    Nodes stand in order of depth (so a row's first nodes are a tree too), siblings in the order in which they
    are tried. Which nodes there are must follow from ranks or confidences, never from a draw: the rules of
    `tree_rules` take each proposal as certain, and `probs` is None.
    """

    parents: torch.Tensor
    """int64 `[B, N]`: the column that each node follows, 0 for the root's children; at most j for node j."""

    @cached_property
    def ancestors(self) -> torch.Tensor:
        """bool `[B, T, T]`: whether column i (dim 1) is column j (dim 2) or follows it, however far."""
        batch, count = self.parents.shape
        follows = torch.eye(count + 1, device=self.parents.device).repeat(batch, 1, 1)
        follows[:, 1:].scatter_(2, self.parents[..., None], 1)
        reach = 1
        while reach < count:  # each product doubles how far back is seen
            follows, reach = (follows @ follows).clamp(max=1), 2 * reach
        return follows > 0

    @cached_property
    def earlier_siblings(self) -> torch.Tensor:
        """bool `[B, N, N]`: whether node j (dim 2) is a sibling of node i (dim 1) that is tried before it."""
        count = self.parents.shape[1]
        before = torch.ones(count, count, dtype=torch.bool, device=self.parents.device).tril(-1)
        return (self.parents[:, :, None] == self.parents[:, None, :]) & before

    @cached_property
    def places(self) -> torch.Tensor:
        """int64 `[B, T]`: where a column's entry is written, counted from the root's.

        The path of first children stands at its depths: where it is accepted, nothing has to move.
        """
        later = torch.nn.functional.pad(self.earlier_siblings.any(dim=2), (1, 0))
        beside = (self.ancestors & later[:, None, :]).any(dim=2)
        first = (~beside).sum(dim=1, keepdim=True)
        return torch.where(beside, first - 1 + beside.cumsum(dim=1), self.depths)

    @cached_property
    def depths(self) -> torch.Tensor:
        """int64 `[B, T]`: 0 for the root, 1 for its children."""
        return self.ancestors.sum(dim=2) - 1

    def depth_of(self, path: torch.Tensor) -> torch.Tensor:
        """int64 `[B]`: tokens on the way to the last of the columns `path [B, D + 1]`."""
        return self.depths.gather(1, path[:, -1:])[:, 0]

    @property
    def within(self) -> torch.Tensor:
        """bool `[B, N]`: the nodes that each row proposes."""
        return torch.arange(self.ids.shape[1], device=self.ids.device) < self.proposed[:, None]

    @property
    def steps(self) -> int:
        return int(self.depths.max())

    @property
    def lengths(self) -> torch.Tensor:
        """int64 `[B]`: tokens on each row's longest path."""
        return torch.where(self.within, self.depths[:, 1:], 0).amax(dim=1)

    def limit(self, lengths: torch.Tensor) -> None:
        near = self.depths[:, 1:] <= lengths[:, None]
        self.proposed = (self.within & near).sum(dim=1)

    def first(self, count: int) -> DraftTree:
        """The tree of each row's first `count` nodes."""
        proposed = self.proposed.clamp(max=count)
        return DraftTree(self.ids[:, :count], proposed, None, self.parents[:, :count])


def along(values: torch.Tensor, path: torch.Tensor) -> torch.Tensor:
    """The columns `path` (int64 `[B, D]`) of `[B, T, ...]`: `[B, D, ...]`."""
    rows = torch.arange(path.shape[0], device=path.device)
    return values[rows[:, None], path]
