"""Verification: which drafted tokens stand, and from what distribution the next one comes. Pure functions.

A rule is two functions of the distributions that were really sampled, `accept_probabilities` and
`next_token_probs`; random numbers only compare. They keep the dtype they are given: float32 in the engine,
float64 in the enumeration tests.

Shapes: B rows, K drafted tokens, V target vocabulary. `drafted` int64 `[B, K]`, of which row b proposes the
first `proposed[b]` (int64 `[B]`); `draft_probs` `[B, K, V]` (column i is what drafted token i was drawn
from); `target_probs` `[B, K + 1, V]` (column i judges drafted token i; the column after the last proposed
token gives the bonus token). Columns of `drafted` and `draft_probs` that are not proposed decide nothing.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Rule(Protocol):
    """A lossless rule: the tokens it lets through, with one token more, follow the target's joint law.

    The number of proposed tokens may depend on the proposed tokens themselves (a drafter that stops early),
    but not on the token that would come next.
    """

    def accept_probabilities(
        self,
        target_probs: torch.Tensor,
        draft_probs: torch.Tensor | None,
        drafted: torch.Tensor,
        proposed: torch.Tensor,
    ) -> torch.Tensor:
        """Chance `[B, K]` of a yes at every drafted position, each decided by a uniform number of its own; 0
        where nothing is proposed.
        """

    def count_accepted(self, decisions: torch.Tensor) -> torch.Tensor:
        """Accepted drafts int64 `[B]` from the decisions bool `[B, K]`."""

    def next_token_probs(
        self,
        target_probs: torch.Tensor,
        draft_probs: torch.Tensor | None,
        drafted: torch.Tensor,
        accepted: torch.Tensor,
        proposed: torch.Tensor,
    ) -> torch.Tensor:
        """Distribution `[B, V]` of the token after `accepted` (int64 `[B]`) drafts."""

    def expected_accepted(self, accept: torch.Tensor) -> torch.Tensor:
        """Mean `[B]` of `count_accepted` over the uniform numbers, for accept probabilities `[B, K]`."""


class PrefixRule:
    """Counting of the rules that stop at the first no."""

    def count_accepted(self, decisions: torch.Tensor) -> torch.Tensor:
        return decisions.long().cumprod(dim=1).sum(dim=1)

    def expected_accepted(self, accept: torch.Tensor) -> torch.Tensor:
        return accept.cumprod(dim=1).sum(dim=1)


class TokenRule(PrefixRule):
    """Token by token: accept x with probability min(1, target(x) / draft(x)), else draw from the residual.

    Its mean over drafts is sum_x min(target, draft) = 1 - TVD (Leviathan et al. 2023, arXiv 2211.17192,
    section 2.3).
    """

    def accept_probabilities(
        self,
        target_probs: torch.Tensor,
        draft_probs: torch.Tensor | None,
        drafted: torch.Tensor,
        proposed: torch.Tensor,
    ) -> torch.Tensor:
        assert draft_probs is not None
        ratios = likelihood_ratios(target_probs, draft_probs, drafted)
        return torch.where(within(proposed, drafted.shape[1]), ratios.clamp(max=1), 0)

    def next_token_probs(
        self,
        target_probs: torch.Tensor,
        draft_probs: torch.Tensor | None,
        drafted: torch.Tensor,
        accepted: torch.Tensor,
        proposed: torch.Tensor,
    ) -> torch.Tensor:
        """After a rejection the residual max(target - draft, 0), renormalised; after full acceptance the
        target's own distribution (the bonus token).
        """
        assert draft_probs is not None
        target = column(target_probs, accepted)
        residual = (target - column(draft_probs, accepted)).clamp(min=0)
        return renormalised(residual, accepted < proposed, target)


class BlockRule:
    """All drafted tokens judged together (Sun et al. 2024, arXiv 2403.10444).

    With P_0 = 1, P_i = min(1, P_(i-1) target(x_i) / draft(x_i)) and Z_i = sum_x max(P_i target_(i+1)(x) -
    draft_(i+1)(x), 0), the first i tokens are found good with probability h_i = Z_i / (Z_i + 1 - P_i), and
    h_n = P_n for all n; the longest good block stands, whatever was found about shorter ones. Where that is
    i < n tokens the next one comes from max(P_i target - draft, 0) / Z_i. On average it accepts at least as
    many of a draft's tokens as the token rule.
    """

    def accept_probabilities(
        self,
        target_probs: torch.Tensor,
        draft_probs: torch.Tensor | None,
        drafted: torch.Tensor,
        proposed: torch.Tensor,
    ) -> torch.Tensor:
        assert draft_probs is not None
        count = drafted.shape[1]
        kept = kept_weights(target_probs, draft_probs, drafted)[:, 1:]
        weighted = kept[:, :-1, None] * target_probs[:, 1:count]
        excess = (weighted - draft_probs[:, 1:]).clamp(min=0).sum(dim=2)
        denominator = excess + 1 - kept[:, :-1]
        # Nothing to decide where P_i = 1 and target and draft agree: the block is good.
        inner = torch.where(denominator > 0, excess / denominator.clamp(min=tiny(excess)), 1)
        last = proposed[:, None] == positions(drafted) + 1
        accept = torch.where(last, kept, torch.cat((inner, kept[:, -1:]), dim=1))
        return torch.where(within(proposed, count), accept, 0)

    def count_accepted(self, decisions: torch.Tensor) -> torch.Tensor:
        """The last yes counts, also after a no."""
        return torch.where(decisions, positions(decisions) + 1, 0).amax(dim=1)

    def next_token_probs(
        self,
        target_probs: torch.Tensor,
        draft_probs: torch.Tensor | None,
        drafted: torch.Tensor,
        accepted: torch.Tensor,
        proposed: torch.Tensor,
    ) -> torch.Tensor:
        assert draft_probs is not None
        target = column(target_probs, accepted)
        weight = kept_weights(target_probs, draft_probs, drafted).gather(1, accepted[:, None])
        residual = (weight * target - column(draft_probs, accepted)).clamp(min=0)
        return renormalised(residual, accepted < proposed, target)

    def expected_accepted(self, accept: torch.Tensor) -> torch.Tensor:
        """sum_i P(some yes at i or later)."""
        return (1 - (1 - accept).flip(1).cumprod(dim=1)).sum(dim=1)


class OneHotRule(PrefixRule):
    """For drafts that were chosen, not drawn (argmax, look-up): the token rule for a draft of probability 1.

    Accept x with probability target(x), else draw from the target without x. It takes no `draft_probs`, and
    K may be 0: plain decoding. (The block rule would accept as many: P_i is then a product of the same.)
    """

    def accept_probabilities(
        self,
        target_probs: torch.Tensor,
        draft_probs: torch.Tensor | None,
        drafted: torch.Tensor,
        proposed: torch.Tensor,
    ) -> torch.Tensor:
        count = drafted.shape[1]
        target = target_probs[:, :count].gather(2, drafted[..., None])[..., 0]
        return torch.where(within(proposed, count), target, 0)

    def next_token_probs(
        self,
        target_probs: torch.Tensor,
        draft_probs: torch.Tensor | None,
        drafted: torch.Tensor,
        accepted: torch.Tensor,
        proposed: torch.Tensor,
    ) -> torch.Tensor:
        target = column(target_probs, accepted)
        if drafted.shape[1] == 0:
            return target
        rejected = drafted.gather(1, accepted.clamp(max=drafted.shape[1] - 1)[:, None])
        return renormalised(target.scatter(1, rejected, 0), accepted < proposed, target)


class MatchRule(PrefixRule):
    """For tokens that the target has already chosen, whatever the draft: a drafted token stands while it is
    the target's.

    The target chooses by its argmax (greedy), or by the noise of each position (`noise.py`), which the draft
    shares. Its distributions are point masses, so ids stand for them: `target_ids` int64 `[B, K + 1]`.
    """

    def accept_probabilities(
        self, target_ids: torch.Tensor, drafted: torch.Tensor, proposed: torch.Tensor
    ) -> torch.Tensor:
        """Float64 `[B, K]`: 1 where the drafted token is the target's, 0 elsewhere."""
        same = drafted == target_ids[:, : drafted.shape[1]]
        return (same & within(proposed, drafted.shape[1])).double()

    def next_token(self, target_ids: torch.Tensor, accepted: torch.Tensor) -> torch.Tensor:
        """The token int64 `[B]` after `accepted` drafts: the first on which the two differ, or the bonus."""
        return target_ids.gather(1, accepted[:, None])[:, 0]


TOKEN, BLOCK, ONE_HOT, MATCH = TokenRule(), BlockRule(), OneHotRule(), MatchRule()


def shared_noise_accept_probabilities(
    target_probs: torch.Tensor, draft_probs: torch.Tensor, drafted: torch.Tensor, proposed: torch.Tensor
) -> torch.Tensor:
    """Chance `[B, K]` that a target which shares the draft's noise chooses the drafted token x too.

    1 / sum_y max(draft(x) target(y) / target(x), draft(y)). The mean over drafts lies between
    (1 - TVD) / (1 + TVD) and 1 - TVD: it follows from the exponential race of `noise.race`, in which x wins
    both where the later of its two bounds leaves every other id behind (Daliri, Musco and Suresh 2024, arXiv
    2408.07978).
    """
    count = drafted.shape[1]
    target = target_probs[:, :count].gather(2, drafted[..., None])
    draft = draft_probs.gather(2, drafted[..., None])
    scaled = draft * target_probs[:, :count] / target.clamp(min=tiny(target))
    chance = 1 / torch.maximum(scaled, draft_probs).sum(dim=2)
    possible = within(proposed, count) & (target[..., 0] > 0)
    return torch.where(possible, chance, 0)


def likelihood_ratios(
    target_probs: torch.Tensor, draft_probs: torch.Tensor, drafted: torch.Tensor
) -> torch.Tensor:
    """target(x) / draft(x) of each drafted token, finite `[B, K]`; 0 for a token that the draft could not
    have drawn (probability 0, or not a number): it is never accepted.
    """
    target = target_probs[:, : drafted.shape[1]].gather(2, drafted[..., None])[..., 0]
    draft = draft_probs.gather(2, drafted[..., None])[..., 0]
    ratios = target / draft.clamp(min=tiny(draft))
    return torch.where(draft > 0, ratios.clamp(max=torch.finfo(ratios.dtype).max), 0)


def kept_weights(
    target_probs: torch.Tensor, draft_probs: torch.Tensor, drafted: torch.Tensor
) -> torch.Tensor:
    """P_0 .. P_K of the block rule, `[B, K + 1]`."""
    ratios = likelihood_ratios(target_probs, draft_probs, drafted)
    weights = [torch.ones_like(target_probs[:, 0, 0])]
    for ratio in ratios.unbind(dim=1):
        weights.append((weights[-1] * ratio).clamp(max=1))
    return torch.stack(weights, dim=1)


def renormalised(residual: torch.Tensor, rejected: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The residual `[B, V]` over its mass where a row was rejected, else the target's distribution.

    Where target and draft agree up to rounding the residual is empty; a rejection there has probability zero
    up to rounding, and the target's distribution stands in, as it does for a draft that is not a number.
    """
    mass = residual.sum(dim=1, keepdim=True)
    return torch.where(rejected[:, None] & (mass > 0), residual / mass.clamp(min=tiny(mass)), target)


def column(probs: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Column `index[b]` of `[B, N, V]`, or the last one where the index is past it: `[B, V]`."""
    rows = torch.arange(probs.shape[0], device=probs.device)
    return probs[rows, index.clamp(max=probs.shape[1] - 1)]


def positions(drafted: torch.Tensor) -> torch.Tensor:
    return torch.arange(drafted.shape[1], device=drafted.device)


def within(proposed: torch.Tensor, count: int) -> torch.Tensor:
    """bool `[B, count]`: the columns that each row proposes."""
    return torch.arange(count, device=proposed.device) < proposed[:, None]


def tiny(like: torch.Tensor) -> float:
    return torch.finfo(like.dtype).tiny
