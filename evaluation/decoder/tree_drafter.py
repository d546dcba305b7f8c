"""Trees of drafts, grown by a drafter of any kind: several tokens that it thought likely for one position.

A tree grows level by level. Behind every node that is likely enough to be worth a draft step the drafter
ranks what may follow; of all tokens that were ranked those are proposed that, by the costs of the verify
forward, bring more than they cost (the dynamic trees of EAGLE-2, Li et al. 2024, arXiv 2406.16858, with a
budget of nodes that follows from costs). Where only one node is worth going on from, the tree is a chain with
siblings; where no sibling pays, it is a chain. How likely a path is says the drafter, so trees differ from
round to round; or, for Medusa, whose heads see no drafted token, the rates at which the ranks of each head
were right before: then the tree is the same one in every round (Cai et al. 2024, arXiv 2401.10774, section
2.3.3).

Nodes are chosen and not drawn, whatever the target samples: see `tree_rules`.

Shapes: B rows, W nodes that are gone on from, M ranks of a step, C tokens ranked in all, V target vocabulary,
Vd rows of a draft head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from evaluation.decoder.drafters import Draft, DraftState, ModelDrafter
from evaluation.decoder.tree import DraftTree

FRONTIER = 8  # nodes of a level that are gone on from at most: a level is one forward of the drafter


@dataclass
class Frontier:
    """The nodes of one level that are gone on from, as the drafter reads them (`runner.Branches`)."""

    ancestors: Tensor
    depths: Tensor
    places: Tensor


@dataclass
class Candidates:
    """Tokens that were ranked, level by level, siblings by rank."""

    ids: Tensor
    """int64 `[B, C]`."""
    chances: Tensor
    """`[B, C]`: how likely the path that ends there is accepted; 0 for what is no candidate."""
    parents: Tensor
    """int64 `[B, C]`: the candidate that each follows, -1 for the root's children."""


class TreeDrafter:
    """Drafts the trees that pay with `drafter`."""

    capturable = follows = False  # which nodes there are depends on confidences

    def __init__(
        self, drafter: ModelDrafter, prices: Sequence[float], rates: Sequence[Sequence[float]] | None = None
    ) -> None:
        """`prices[n]`: accepted tokens that a tree of n nodes has to bring, `prices[0]` is 0 and the last one
        that of the largest tree. A node is gone on from where its path is at least as likely as the
        drafter's `stop_below`. `rates[s][m]`: how often rank m of drafted token number s was right, to be
        taken for the drafter's own probabilities.
        """
        assert drafter.argmax and len(prices) > 1 and prices[0] == 0, (drafter.argmax, prices)
        self.drafter = drafter
        device = drafter.target.device
        measured = torch.tensor(prices[1:], dtype=torch.float64, device=device)
        self.prices = measured.cummax(dim=0).values  # a larger tree is no cheaper, whatever a stopwatch says
        self.rates = None if rates is None else torch.tensor(rates, dtype=torch.float64, device=device)
        size = drafter.target_vocab_size if drafter.vocab is None else len(drafter.vocab)
        # Of the probabilities of a distribution the one of rank r is at most 1 / r.
        nodes = torch.arange(1, len(prices), device=device)
        least = max(float((self.prices / nodes).min()), 1 / len(prices))
        self.ranks = min(max(int(1 / least), 1), size)

    def start(self, row: int) -> None:
        self.drafter.start(row)

    def prepare(self, state: DraftState, count: int) -> None:
        self.drafter.prepare(state, count)

    def move(self, source: int, destination: int) -> None:
        self.drafter.move(source, destination)

    @torch.inference_mode()
    def draft(self, state: DraftState, count: int) -> Draft:
        if not self.drafter.begin(state, count):
            return Draft.none(state.position)
        return chosen(self.grow(state, count), self.prices)

    def grow(self, state: DraftState, count: int) -> Candidates:
        """All that is ranked in a tree of at most `count` levels."""
        drafter, position = self.drafter, state.position
        room = drafter.room(position)
        # A row's tree does not depend on how long its neighbours go on.
        usable = position.new_tensor(count) if state.left is None else state.left
        reach = ((position < drafter.context) & (usable > 0)).double()[:, None]
        logits = drafter.first_behind_tree(state)[:, None]
        prefix = state.prefix and state.prefix.along(state.tokens[:, :0])
        seen = torch.ones(len(position), 1, 1, dtype=torch.bool, device=position.device)
        behind = position.new_full((len(position), 1), -1)
        found: list[Candidates] = []
        total = chained = 0
        for depth in range(1, count + 1):
            ids, chances = self.ranked(drafter.adjust(logits, prefix), depth - 1)
            paths = (reach[..., None] * chances).flatten(1)
            ids, ranks = ids.flatten(1), ids.shape[2]
            found.append(Candidates(ids, paths, behind.repeat_interleave(ranks, dim=1)))
            best, index = paths.topk(min(FRONTIER, paths.shape[1]), dim=1)
            goes_on = (position + depth < drafter.context) & (depth < usable)
            going = (best >= drafter.stop_below) & (best > 0) & goes_on[:, None]
            width = min(int(going.sum(dim=1).max()), room + 1 - seen.shape[2])
            if width < 1 or depth == count:
                break
            reach, index = torch.where(going, best, 0)[:, :width], index[:, :width]
            parents, behind = index // ranks, total + index
            total += paths.shape[1]
            own = torch.eye(width, dtype=torch.bool, device=seen.device).expand(len(seen), -1, -1)
            seen = torch.cat((seen.take_along_dim(parents[..., None], dim=1), own), dim=2)
            tokens = ids.gather(1, index)
            prefix = prefix and prefix.pick(parents).followed_by(tokens)
            logits = drafter.branch(tokens, parents, self.frontier(seen, position, depth), state)
            chained += width == 1 and chained == depth - 1
        drafter.settle(position, chained)
        parts = ((each.ids, each.chances, each.parents) for each in found)
        return Candidates(*(torch.cat(part, dim=1) for part in zip(*parts, strict=True)))

    def frontier(self, seen: Tensor, position: Tensor, depth: int) -> Frontier:
        """As the drafter reads them: columns `seen` bool `[B, W, C]`, written one behind the other."""
        columns = torch.arange(seen.shape[2], device=seen.device).expand(len(seen), -1)
        # Rows near the end are not gone on from, but their forward needs positions that there are.
        depths = (self.drafter.context - 1 - position).clamp(min=0, max=depth)[:, None]
        return Frontier(seen, depths.expand(-1, seen.shape[1]), columns)

    def ranked(self, logits: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Of logits `[B, W, Vd]` the likeliest ids int64 `[B, W, M]`, and how likely each is, float64."""
        drafter = self.drafter
        confidence, index = logits.softmax(dim=-1).topk(self.ranks)
        ids = index if drafter.vocab is None else drafter.vocab[index]
        chances = confidence.double()
        if self.rates is not None:
            known = self.rates[step, : self.ranks]
            ids, chances = ids[..., : len(known)], known.expand(*chances.shape[:2], -1)
            confidence = confidence[..., : len(known)]
        # A distribution that is not a number proposes nothing.
        return ids, torch.where(confidence.isnan(), 0, chances)


def chosen(grown: Candidates, prices: Tensor) -> Draft:
    """The tree of the likeliest candidates, as many of a row as bring most over their price; a chain where no
    row has two that follow the same.

    `prices` float64 `[N]`: of 1 to N nodes, in accepted tokens. At least one is proposed where there is one.
    """
    most = min(len(prices), grown.ids.shape[1])
    likely, order = grown.chances.sort(dim=1, descending=True, stable=True)  # so parents come first
    likely, order = likely[:, :most], order[:, :most]
    proposed = (likely.cumsum(dim=1) - prices[:most]).argmax(dim=1) + 1
    proposed = proposed.minimum((likely > 0).sum(dim=1))
    taken = torch.arange(most, device=order.device) < proposed[:, None]
    marked = torch.zeros_like(grown.ids, dtype=torch.bool).scatter(1, order, taken)
    columns = torch.nn.functional.pad(marked.cumsum(dim=1), (1, 0))  # of the candidates; 0 is the root's
    width = int(proposed.max())
    order = marked.long().argsort(dim=1, descending=True, stable=True)[:, :width]
    ids, parents = grown.ids.gather(1, order), columns.gather(1, grown.parents.gather(1, order) + 1)
    tree = DraftTree(ids, proposed, None, parents)
    chain = torch.arange(width, device=order.device)
    if ((parents == chain) | ~tree.within).all():
        return Draft(ids, proposed, None)
    return tree
