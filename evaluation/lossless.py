"""Is speculative output the target's own? Greedy identity, with every first divergence explained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from evaluation.decoder.engine import Request
from evaluation.decoder.runner import Runner

Verdict = Literal["identical", "near_tie", "bug"]
NOISE_MARGIN = (
    4.0  # a gap within this many times the measured noise is a tie that rounding may break either way
)


def compare_greedy(
    target: Runner, request: Request, plain: Sequence[int], speculative: Sequence[int]
) -> Verdict:
    """Compare two greedy continuations of one request.

    Forwards of different widths round differently, so two ids whose logits agree up to that noise may swap.
    The noise is measured where it matters, at the first divergence: between the logits of one forward over
    the whole text and of a step of width 1 over its cache.
    """
    if list(plain) == list(speculative):
        return "identical"
    shared = next(
        (i for i, pair in enumerate(zip(plain, speculative, strict=False)) if pair[0] != pair[1]), None
    )
    if shared is None:  # one stops where the other goes on
        return "bug"
    context = torch.tensor([*request.prompt, *plain[:shared]])
    wide = target.logits(target.prefill(context, 0))[0]
    target.prefill(context[:-1], 0)
    single = target.logits(target.prefill(context[-1:], 0, len(context) - 1))[0]
    noise = float((wide - single).abs().max())
    gap = float((single[plain[shared]] - single[speculative[shared]]).abs())
    best = float(single.max() - torch.minimum(single[plain[shared]], single[speculative[shared]]))
    return "near_tie" if max(gap, best) <= NOISE_MARGIN * noise else "bug"
