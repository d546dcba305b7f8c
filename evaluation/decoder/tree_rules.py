"""Verification of trees: which path of proposed tokens stands, and from what distribution the next one comes.
Pure functions, as in `verify.py`.

Nodes were chosen, not drawn, so the one-hot rule holds among siblings: the first is accepted with its
probability, else it is taken out of the target's distribution, which is renormalised, and the next one is
tried. (The ratio rules for children drawn with or without replacement, Miao et al. 2024, arXiv 2305.09781,
and Chen et al. 2024, arXiv 2402.12374, are wrong for children chosen by rank.)

Shapes: B rows, N nodes, T = N + 1 columns of which column 0 is the last emitted token, V target vocabulary, D
tokens accepted in the luckiest row. `target_probs` `[B, T, V]`: column j is the target's distribution after
the path that ends there.
"""

from __future__ import annotations

import torch

from evaluation.decoder.tree import DraftTree, along
from evaluation.decoder.verify import renormalised, tiny


def accept_probabilities(target_probs: torch.Tensor, tree: DraftTree) -> torch.Tensor:
    """Chance `[B, N]` that a node is accepted once its parent stands and its earlier siblings were rejected.

    target(x) / (1 - target of the earlier siblings); 0 where nothing is proposed.
    """
    chances = node_chances(target_probs, tree)
    left = (1 - (tree.earlier_siblings * chances[:, None, :]).sum(dim=2)).clamp(min=tiny(chances))
    return (chances / left).clamp(max=1)


def next_token_probs(target_probs: torch.Tensor, tree: DraftTree, last: torch.Tensor) -> torch.Tensor:
    """Distribution `[B, V]` of the token after the accepted column `last` (int64 `[B]`): the target's there,
    without that column's children, which were all rejected.
    """
    target = along(target_probs, last[:, None])[:, 0]
    rejected = tree.within & (tree.parents == last[:, None])
    kept = torch.ones_like(target).scatter_reduce_(1, tree.ids, (~rejected).to(target.dtype), "prod")
    return renormalised(target * kept, rejected.any(dim=1), target)


def match_probabilities(target_ids: torch.Tensor, tree: DraftTree) -> torch.Tensor:
    """For a target that has chosen its tokens already, `target_ids` int64 `[B, T]`, greedily or by noise of
    each position: float64 `[B, N]`, 1 where a node is what the target chose after the node's parent.
    """
    return ((tree.ids == target_ids.gather(1, tree.parents)) & tree.within).double()


def walk(decisions: torch.Tensor, tree: DraftTree) -> torch.Tensor:
    """The accepted path by the decisions bool `[B, N]`: columns int64 `[B, D + 1]` from the root on; from
    each node to its first child with a yes. A shorter row's path repeats its last column.
    """
    path = [torch.zeros_like(tree.proposed)]
    while True:
        yes = decisions & (tree.parents == path[-1][:, None])
        found = yes.any(dim=1)
        if not found.any():
            return torch.stack(path, dim=1)
        path.append(torch.where(found, yes.long().argmax(dim=1) + 1, path[-1]))


def expected_accepted(target_probs: torch.Tensor, tree: DraftTree) -> torch.Tensor:
    """Accepted tokens `[B]` on average: each node stands where the target would have drawn its path."""
    chances = torch.cat((torch.ones_like(target_probs[:, :1, 0]), node_chances(target_probs, tree)), dim=1)
    paths = torch.where(tree.ancestors, chances[:, None, :], 1).prod(dim=2)
    return paths[:, 1:].sum(dim=1)


def node_chances(target_probs: torch.Tensor, tree: DraftTree) -> torch.Tensor:
    """The target's probability `[B, N]` of each node after its parent; 0 where nothing is proposed, or only
    what an earlier sibling was.
    """
    rows = torch.arange(len(tree.ids), device=tree.ids.device)
    chances = target_probs[rows[:, None], tree.parents, tree.ids]
    same = tree.ids[:, :, None] == tree.ids[:, None, :]
    return torch.where(tree.within & ~(same & tree.earlier_siblings).any(dim=2), chances, 0)
