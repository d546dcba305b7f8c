"""Two drafters measured in one run, interleaved on the same prompts: is the challenger faster?

Speedups of two evaluations differ by the machine's mood of two days. Here plain decoding, champion and
challenger take turns, and the difference is judged by its own paired interval.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from evaluation.decoder.drafters import DraftModel
    from evaluation.decoder.engine import Request
    from evaluation.evaluate import ServingConfig
    from evaluation.speed import Timing

RESAMPLES = 2000


def duel(
    target: PreTrainedModel,
    eos_ids: Sequence[int],
    drafters: Mapping[str, DraftModel],
    requests: Sequence[Request],
    count: int,
    serving: ServingConfig,
    *,
    seed: int,
    on_group: Callable[[], None],
) -> dict[str, Any]:
    """Each drafter's `speedup` over plain decoding and its `bugs`, and the `difference` of the first over the
    second (over plain decoding where there is none), with 95 % intervals.

    Every drafter races as it is served: up to `count` drafts a round, stopping early where its own costs,
    measured first, say that going on would not pay. There is no guard: servers have none, it would hide how
    much a bad drafter loses, and its balance would tie one group's time to those before it, while the
    interval takes them as independent.
    """
    from evaluation.decoder.engine import Decoder
    from evaluation.decoder.kinds import make_drafter
    from evaluation.decoder.runner import Runner
    from evaluation.decoder.sampling import SamplingOptions
    from evaluation.lossless import compare_greedy
    from evaluation.speed import measure_costs, race, speedup, stop_threshold

    options = SamplingOptions(serving.temperature, serving.top_p)
    length = max(len(request.prompt) + request.max_new_tokens for request in requests) + count + 1
    runner = Runner(target, serving.batch_size, length)
    decoders = {"plain": Decoder(runner, eos_ids=eos_ids, options=options)}
    for name, draft in drafters.items():
        drafter = make_drafter(draft, runner, options, argmax=serving.draft_sampling == "argmax", int8=True)
        costs = measure_costs(runner, drafter, range(1, count + 1), serving.batch_size)
        drafter.stop_below = stop_threshold(costs)
        decoders[name] = Decoder(
            runner, eos_ids=eos_ids, options=options, drafter=drafter, num_speculative_tokens=count
        )
    size = serving.batch_size
    groups = [requests[first : first + size] for first in range(0, len(requests), size)]
    timings = race(decoders, groups, on_group)
    plain = timings.pop("plain")
    found: dict[str, Any] = {"prompts": len(requests), "groups": len(groups)}
    for name, timing in timings.items():
        asked = zip(requests, plain.outputs, timing.outputs, strict=True)
        bugs = sum(
            options.greedy and compare_greedy(runner, request, first.tokens, second.tokens) == "bug"
            for request, first, second in asked
        )
        found[name] = {
            "speedup": speedup(plain, timing, seed=seed),
            "bugs": int(bugs),
            "tokens_per_second": timing.tokens_per_second,
        }
    found["plain_tokens_per_second"] = plain.tokens_per_second
    first, *others = timings.values()
    found["difference"] = difference(plain, first, others[0] if others else plain, seed=seed)
    return found


def difference(plain: Timing, first: Timing, second: Timing, *, seed: int) -> dict[str, float]:
    """Speedup of `first` minus that of `second`, both over `plain`, with a 95 % percentile bootstrap interval
    over prompts; each resample draws the same prompts for all three.
    """
    tokens = [np.array(timing.tokens, dtype=float) for timing in (plain, first, second)]
    timed = np.all([counts > 0 for counts in tokens], axis=0)
    rate = np.array(plain.seconds)[timed] / tokens[0][timed]
    work = [rate * counts[timed] for counts in tokens[1:]]
    seconds = [np.array(timing.seconds)[timed] for timing in (first, second)]
    drawn = np.random.default_rng(seed).integers(timed.sum(), size=(RESAMPLES, timed.sum()))

    def gap(pick: Any) -> Any:
        ratios = [own[pick].sum(-1) / spent[pick].sum(-1) for own, spent in zip(work, seconds, strict=True)]
        return ratios[0] - ratios[1]

    low, high = np.percentile(gap(drawn), [2.5, 97.5])
    return {"mean": float(gap(np.arange(timed.sum()))), "low": float(low), "high": float(high)}


def judge(measured: Mapping[str, Any], champion: str | None) -> tuple[bool, str]:
    """Does the challenger win, and why (not). `champion`: its version, None where there is none."""
    own, gap = measured["challenger"], measured["difference"]
    if own["bugs"]:
        outputs = f"{own['bugs']} of {measured['prompts']} outputs"
        return False, f"{outputs} differ from plain decoding by more than a near tie."
    over = f"the champion's (version {champion})" if champion else "plain decoding's"
    speeds = f"{own['speedup']['mean']:.2f}x"
    if champion:
        speeds += f" against {measured['champion']['speedup']['mean']:.2f}x"
    said = (
        f"{speeds}, measured in turns on {measured['prompts']} prompts: a difference to {over} of "
        f"{gap['mean']:+.2f} [{gap['low']:+.2f}, {gap['high']:+.2f}]"
    )
    if gap["low"] > 0:
        return True, f"{said}, which lies above zero."
    return False, f"{said}, which {'lies below' if gap['high'] < 0 else 'includes'} zero."
