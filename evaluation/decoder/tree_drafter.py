"""A small model that drafts a chain and, where it was unsure, the tokens it thought of second.

A sibling takes no draft step, for the step that gave the chain's token ranked it too; it costs one more
column of the verify forward, so it is added where the drafter's own probability of its path says that it
pays. An accepted sibling ends the round: nothing was drafted behind it.

Shapes: B rows, S draft steps, M ranks of a step, V target vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch

from evaluation.decoder.drafters import Draft, DraftModel, DraftState, ModelDrafter
from evaluation.decoder.noise import Draws
from evaluation.decoder.runner import Runner
from evaluation.decoder.sampling import SamplingOptions
from evaluation.decoder.tree import DraftTree


class TreeDrafter(ModelDrafter):
    """Drafts its most likely chain and siblings beside it; they are chosen, also where the target samples."""

    capturable = False  # how many siblings there are depends on confidences

    def __init__(
        self,
        draft: DraftModel,
        target: Runner,
        options: SamplingOptions,
        *,
        sibling_above: float,
        max_siblings: int,
        **settings: Any,
    ) -> None:
        """`settings` as `ModelDrafter`'s. A token of lower rank is added where the drafter's own probability
        of its path is at least `sibling_above`, and up to `max_siblings` a round, those near the root first.
        """
        super().__init__(draft, target, options, argmax=True, **settings)
        assert 0 < sibling_above, sibling_above
        self.sibling_above, self.max_siblings = sibling_above, max_siblings
        # Of the probabilities of a distribution the one of rank r is at most 1 / r.
        size = target.vocab_size if self.vocab is None else len(self.vocab)
        self.ranks = min(max(int(1 / sibling_above), 1), size)
        self.ranked: list[tuple[torch.Tensor, torch.Tensor]] = []

    def choose(
        self, logits: torch.Tensor, draws: Draws, step: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        confidence, index = logits.softmax(dim=-1).topk(self.ranks)
        ids = index if self.vocab is None else self.vocab[index]
        self.ranked.append((ids, confidence))
        return ids[:, 0], logits.new_empty(0), confidence[:, 0]

    def draft(self, state: DraftState, count: int) -> Draft:
        self.ranked = []
        chain = super().draft(state, count)
        if not self.ranked:
            return chain
        ids, confidence = (torch.stack(parts, dim=1) for parts in zip(*self.ranked, strict=True))
        return with_siblings(chain, ids, confidence, self.sibling_above, self.max_siblings)


def with_siblings(
    chain: Draft, ids: torch.Tensor, confidence: torch.Tensor, above: float, most: int
) -> Draft:
    """The chain and, of the ids of each step by rank (int64 `[B, S, M]`, rank 0 the chain's own) with the
    drafter's `confidence [B, S, M]`, those whose path is at least `above` likely, up to `most` of a row.

    The chain itself where no row has any.
    """
    _, steps, ranks = ids.shape
    drafted = torch.arange(steps, device=ids.device) < chain.proposed[:, None]
    reach = confidence[..., 0].cumprod(dim=1).roll(1, dims=1)
    reach[:, 0] = 1
    likely = (reach[..., None] * confidence >= above) & drafted[..., None]
    likely[..., 0] = False
    likely &= likely.flatten(1).cumsum(dim=1).view_as(likely) <= most
    if not likely.any():
        return chain
    likely[..., 0] = drafted
    chosen = likely.flatten(1)
    columns = chosen.cumsum(dim=1)  # of the chosen; all steps follow the chain's token of the step before
    before = torch.nn.functional.pad(columns[:, ::ranks], (1, -1)).repeat_interleave(ranks, dim=1)
    proposed = chosen.sum(dim=1)
    order = chosen.long().argsort(dim=1, descending=True, stable=True)[:, : int(proposed.max())]
    return DraftTree(ids.flatten(1).gather(1, order), proposed, None, before.gather(1, order))
