"""Verification: which drafted tokens stand, and from what distribution the next one comes. Pure functions.

A rule is two functions of the distributions that were really sampled; random numbers only compare. They keep
the dtype they are given: float32 in the engine, float64 in the enumeration tests.

Shapes: B rows, K drafted tokens, V target vocabulary. `drafted` int64 `[B, K]`, `draft_probs` `[B, K, V]`,
`target_probs` `[B, K + 1, V]` (position i judges drafted token i; position K gives the bonus token).
"""

from __future__ import annotations

import torch


def accept_probabilities(
    target_probs: torch.Tensor, draft_probs: torch.Tensor, drafted: torch.Tensor
) -> torch.Tensor:
    """Token rule: `min(1, target(x) / draft(x))` of each drafted token x, `[B, K]`.

    Its mean over drafts is sum_x min(target, draft) = 1 - TVD (Leviathan et al. 2023, arXiv 2211.17192,
    section 2.3). A one-hot `draft_probs` (argmax or look-up drafts) gives `target(x)`.
    """
    count = drafted.shape[1]
    target = target_probs[:, :count].gather(2, drafted[..., None])[..., 0]
    draft = draft_probs.gather(2, drafted[..., None])[..., 0]
    # A token that the draft could not have drawn has draft probability 0: never divide by it, never accept
    # it.
    return torch.where(draft > 0, target / draft.clamp(min=torch.finfo(draft.dtype).tiny), 0).clamp(max=1)


def count_accepted(accepted: torch.Tensor, proposed: torch.Tensor) -> torch.Tensor:
    """Length of the accepted prefix int64 `[B]`, from per-token decisions bool `[B, K]` and proposed lengths
    `[B]`.
    """
    positions = torch.arange(accepted.shape[1], device=accepted.device)
    within = accepted & (positions < proposed[:, None])
    return within.long().cumprod(dim=1).sum(dim=1)


def next_token_probs(
    target_probs: torch.Tensor, draft_probs: torch.Tensor, accepted: torch.Tensor, proposed: torch.Tensor
) -> torch.Tensor:
    """Distribution `[B, V]` of the token after the accepted prefix, given `accepted` and `proposed` int64
    `[B]`.

    After a rejection the residual `max(target - draft, 0)`, renormalised; after full acceptance the target's
    own distribution (the bonus token). Where target and draft agree up to rounding the residual is empty; a
    rejection there has probability zero up to rounding, and the target's distribution stands in.
    """
    rows = torch.arange(target_probs.shape[0], device=target_probs.device)
    target = target_probs[rows, accepted]
    if draft_probs.shape[1] == 0:
        return target
    draft = draft_probs[rows, accepted.clamp(max=draft_probs.shape[1] - 1)]
    residual = (target - draft).clamp(min=0)
    mass = residual.sum(dim=1, keepdim=True)
    use_residual = (accepted < proposed)[:, None] & (mass > 0)
    return torch.where(use_residual, residual / mass.clamp(min=torch.finfo(mass.dtype).tiny), target)


def verify_greedy(target_ids: torch.Tensor, drafted: torch.Tensor, proposed: torch.Tensor) -> torch.Tensor:
    """Accepted prefix int64 `[B]` at temperature 0: a drafted token stands while it is the target's argmax.

    `target_ids` int64 `[B, K + 1]` are the target's argmaxes; the next token is `target_ids[b, accepted[b]]`.
    """
    return count_accepted(drafted == target_ids[:, : drafted.shape[1]], proposed)
