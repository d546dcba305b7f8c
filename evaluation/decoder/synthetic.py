"""The speed that another drafter would buy: drafts are accepted at given rates instead of on their merits.

Every forward, draw and copy of a round happens as it would, so times are real. The text is not: what comes
out are placeholders that no tokenizer decodes, so that nobody can serve it by mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from data.errors import UserError
from evaluation.decoder.drafters import Draft
from evaluation.decoder.engine import Decoder
from evaluation.decoder.judge import Verdict
from evaluation.decoder.noise import Draws
from evaluation.decoder.penalties import Prefix
from evaluation.decoder.rows import Output, Request
from evaluation.decoder.tree import DraftTree
from evaluation.decoder.verify import TOKEN, within

PLACEHOLDER = -100
FINISH_REASON = "synthetic"


class SyntheticDecoder(Decoder):
    """A decoder that accepts the draft at position i, once reached, with probability
    `conditional_acceptance[i]`.

    Answers are as long as asked for; their tokens are all `PLACEHOLDER`, and rounds, accounts and seconds are
    what is wanted of them.
    """

    def __init__(self, *args: Any, conditional_acceptance: Sequence[float], **settings: Any) -> None:
        """Arguments as `Decoder`'s. UserError where a rate is missing or not in [0, 1]."""
        super().__init__(*args, **{**settings, "eos_ids": []})
        rates, most = list(conditional_acceptance), self.schedule.most
        if len(rates) < most or not all(0 <= rate <= 1 for rate in rates):
            raise UserError(
                f"synthetic acceptance rates are {rates}; give one in [0, 1] for each of {most} drafts."
            )
        if self.stop.strings:
            raise UserError("synthetic acceptance makes no text; leave out the stop strings.")
        device = self.runner.device
        self.judge = SyntheticJudge(
            self.judge, torch.tensor(rates[:most], dtype=torch.float64, device=device)
        )

    def generate(
        self,
        requests: Sequence[Request],
        on_tokens: Callable[[int], None] | None = None,
        *,
        keep_full: bool = False,
    ) -> list[Output]:
        outputs = super().generate(requests, on_tokens, keep_full=keep_full)
        return [
            replace(output, tokens=[PLACEHOLDER] * len(output.tokens), finish_reason=FINISH_REASON)
            for output in outputs
        ]


class SyntheticJudge:
    """Does a judge's whole work and then overrules how many drafts stand."""

    def __init__(self, judge: Callable[..., Verdict], rates: torch.Tensor) -> None:
        self.judge, self.rates = judge, rates

    def __call__(self, logits: torch.Tensor, draft: Draft, draws: Draws, prefix: Prefix | None) -> Verdict:
        if isinstance(draft, DraftTree):
            raise UserError(
                "synthetic acceptance rates are a chain's; give it a drafter that makes no trees."
            )
        token = self.judge(logits, draft, draws, prefix).token
        width = draft.ids.shape[1]
        accept = self.rates[:width] * within(draft.proposed, width)
        accepted = TOKEN.count_accepted(draws.decide(accept))
        return Verdict(accepted, token, {FINISH_REASON: TOKEN.expected_accepted(accept)})
