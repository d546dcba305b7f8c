"""From the target's logits to what a round's drafts come to: the rules of `verify.py` at work.

Shapes: B rows, K drafted tokens, V target vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

import torch

from data.errors import UserError
from evaluation.decoder import tree_rules
from evaluation.decoder.drafters import Draft
from evaluation.decoder.noise import Draws
from evaluation.decoder.penalties import Adjustment, Prefix
from evaluation.decoder.sampling import SamplingOptions, probabilities
from evaluation.decoder.tree import DraftTree
from evaluation.decoder.verify import (
    BLOCK,
    MATCH,
    ONE_HOT,
    TOKEN,
    Rule,
    shared_noise_accept_probabilities,
)

RuleName = Literal["block", "token", "shared_noise"]
UNSOUND = -1  # stands for a token where the target's logits are not finite; found when tokens are read


@dataclass
class Verdict:
    """What a round's drafts came to."""

    accepted: torch.Tensor
    """int64 `[B]`."""
    token: torch.Tensor
    """int64 `[B]`: the token after the accepted drafts, or UNSOUND."""
    expected: dict[str, torch.Tensor] = field(default_factory=dict)
    """`[B]` by rule: accepted drafts on average over its uniform numbers, given the same drafts and
    distributions.
    """
    path: torch.Tensor | None = None
    """Of a tree: the accepted columns int64 `[B, D + 1]`, from the root on (`tree_rules.walk`)."""


class Judge:
    """Judges drafts for one target and one set of sampling options."""

    def __init__(
        self, options: SamplingOptions, rule: RuleName, vocab_size: int, device: torch.device
    ) -> None:
        if rule not in get_args(RuleName):
            raise UserError(f"verification rule {rule!r} is unknown; choose block, token or shared_noise.")
        self.options, self.rule = options, rule
        self.adjust = Adjustment(options, vocab_size, device)

    def __call__(self, logits: torch.Tensor, draft: Draft, draws: Draws, prefix: Prefix | None) -> Verdict:
        """The verdict on drafts of rows with text so far `prefix` `[B, V]`, by the target's logits `[B, K +
        1, V]`.
        """
        ancestors = draft.ancestors if isinstance(draft, DraftTree) else None
        logits = self.adjust(logits, prefix and prefix.along(draft.ids, ancestors))
        if isinstance(draft, DraftTree):
            verdict = self.climb(logits, draft, draws)
        elif self.options.greedy:
            verdict = match(logits.argmax(dim=-1), draft)
        elif draws.shared:
            verdict = share(probabilities(logits, self.options), draft, draws)
        else:
            verdict = self.reject(probabilities(logits, self.options), draft, draws)
        if not draft.ids.shape[1]:
            verdict.expected = {}  # no drafts, no rule
        # The maximum of logits with a NaN is NaN. What stands behind a row's drafts is no part of it.
        read = torch.arange(logits.shape[1], device=logits.device) <= draft.proposed[:, None]
        sound = (logits.amax(dim=2).isfinite() | ~read).all(dim=1)
        verdict.token = torch.where(sound, verdict.token, UNSOUND)
        return verdict

    def climb(self, logits: torch.Tensor, tree: DraftTree, draws: Draws) -> Verdict:
        """The same three ways for a tree, whose nodes were chosen."""
        if self.options.greedy:
            return match_tree(logits.argmax(dim=-1), tree)
        target_probs = probabilities(logits, self.options)
        expected = tree_rules.expected_accepted(target_probs, tree)
        if draws.shared:
            verdict = match_tree(draws.race(target_probs, tree.depths + 1), tree)
            verdict.expected = {"shared_noise": expected}
            return verdict
        accept = tree_rules.accept_probabilities(target_probs, tree)
        path = tree_rules.walk(draws.decide(accept), tree)
        following = tree_rules.next_token_probs(target_probs, tree, path[:, -1])
        return Verdict(tree.depth_of(path), draws.next(following), {"one_hot": expected}, path)

    def reject(self, target_probs: torch.Tensor, draft: Draft, draws: Draws) -> Verdict:
        """Drafts stand with a rule's probabilities; the next token is drawn from what they leave."""
        rules: dict[str, Rule] = {"block": BLOCK, "token": TOKEN}
        used: str = self.rule
        if draft.probs is None:
            rules, used = {"one_hot": ONE_HOT}, "one_hot"
        accept = {
            name: rule.accept_probabilities(target_probs, draft.probs, draft.ids, draft.proposed)
            for name, rule in rules.items()
        }
        accepted = rules[used].count_accepted(draws.decide(accept[used]))
        following = rules[used].next_token_probs(
            target_probs, draft.probs, draft.ids, accepted, draft.proposed
        )
        expected = {name: rule.expected_accepted(accept[name]) for name, rule in rules.items()}
        return Verdict(accepted, draws.next(following), expected)


def match(target_ids: torch.Tensor, draft: Draft) -> Verdict:
    """Drafts stand while they are the tokens `[B, K + 1]` that the target has chosen: no chance is left."""
    accept = MATCH.accept_probabilities(target_ids, draft.ids, draft.proposed)
    accepted = MATCH.count_accepted(accept > 0)
    expected = MATCH.expected_accepted(accept)
    return Verdict(accepted, MATCH.next_token(target_ids, accepted), {"match": expected})


def match_tree(target_ids: torch.Tensor, tree: DraftTree) -> Verdict:
    """As `match`, for the tokens `[B, T]` that the target has chosen after every column."""
    path = tree_rules.walk(tree_rules.match_probabilities(target_ids, tree) > 0, tree)
    token = target_ids.gather(1, path[:, -1:])[:, 0]
    accepted = tree.depth_of(path)
    return Verdict(accepted, token, {"match": accepted.double()}, path)


def share(target_probs: torch.Tensor, draft: Draft, draws: Draws) -> Verdict:
    """The target chooses by the noise of each position; the expectation is over that noise, given the
    drafts.
    """
    ahead = torch.arange(1, target_probs.shape[1] + 1, device=target_probs.device)
    verdict = match(draws.race(target_probs, ahead.expand(target_probs.shape[:2])), draft)
    if draft.probs is None:
        accept = ONE_HOT.accept_probabilities(target_probs, None, draft.ids, draft.proposed)
    else:
        accept = shared_noise_accept_probabilities(target_probs, draft.probs, draft.ids, draft.proposed)
    verdict.expected = {"shared_noise": MATCH.expected_accepted(accept)}
    return verdict
