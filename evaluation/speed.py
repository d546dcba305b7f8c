"""Speed measured side by side: decoders take turns on the same prompts, and the cost model says what they
should reach.

All ratios come from one run on one machine. Seconds are wall clock; prefill (time to first token) is kept
apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from evaluation.acceptance import bootstrap_ratio
from evaluation.decoder.drafters import ModelDrafter
from evaluation.decoder.engine import Decoder, Output, Request
from evaluation.decoder.runner import Runner

COST_REPEATS = 15
TYPICAL_POSITION = 128
ASSUMED_SPEEDUP = 1.5  # where the decision to draft on matters most: neither hopeless nor certain
RAREST_SIBLING = 0.02  # at least so likely; ranks from 50 on are not looked at
CHAIN_FROM = 0.5  # no token but the drafter's first choice can be more likely


@dataclass
class Timing:
    """What one decoder took for the groups of prompts it decoded; a group fills one batch."""

    prefill_seconds: list[float] = field(default_factory=list)
    decode_seconds: list[float] = field(default_factory=list)
    outputs: list[list[Output]] = field(default_factory=list)

    @property
    def decoded_tokens(self) -> list[int]:
        """Tokens of each group after the first of each row, which the prefill gives."""
        return [sum(len(output.tokens) - 1 for output in group) for group in self.outputs]

    @property
    def tokens_per_second(self) -> float:
        return sum(self.decoded_tokens) / max(sum(self.decode_seconds), 1e-9)


def race(
    decoders: dict[str, Decoder], groups: Sequence[Sequence[Request]], on_group: Callable[[], None]
) -> dict[str, Timing]:
    """Decode every group with every decoder, taking turns in rotating order after a warm-up; the timings by
    name.
    """
    timings = {name: Timing() for name in decoders}
    names = list(decoders)
    warm_up = [Request(r.prompt, min(8, r.max_new_tokens), r.seed) for r in groups[0]]
    for name in names:
        decoders[name].generate(warm_up)
    for number, group in enumerate(groups):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            decoder = decoders[name]
            outputs = decoder.generate(group)
            timings[name].prefill_seconds.append(decoder.prefill_seconds)
            timings[name].decode_seconds.append(decoder.decode_seconds)
            timings[name].outputs.append(outputs)
        on_group()
    return timings


def speedup(plain: Timing, speculative: Timing, *, seed: int) -> dict[str, float]:
    """Speculative over plain tokens/s, paired by group, with a 95 % bootstrap interval over groups.

    The ratio of total seconds per token; where both give the same tokens (temperature 0) it is the ratio of
    seconds.
    """
    plain_tokens, draft_tokens = np.array(plain.decoded_tokens), np.array(speculative.decoded_tokens)
    plain_seconds, draft_seconds = np.array(plain.decode_seconds), np.array(speculative.decode_seconds)
    # Groups that end with their first token have nothing to time.
    timed = (plain_tokens > 0) & (draft_tokens > 0)
    same_work = plain_seconds[timed] / plain_tokens[timed] * draft_tokens[timed]
    return bootstrap_ratio(same_work, draft_seconds[timed], seed=seed)


def drafting(timing: Timing, count: int, *, seed: int) -> dict[str, Any]:
    """Tokens per target call and acceptance by position of a speculative decoder, from its rounds.

    `conditional_acceptance[i]`: accepted at position i among the rounds that proposed it and accepted all
    before it; `unconditional_acceptance[i]`: among all rounds that proposed it. `siblings` of the `drafted`
    tokens stood beside a tree's longest path. Tokens per target call include the bonus token and not the
    prefill's token; the interval is a bootstrap over rows.
    """
    outputs = [output for group in timing.outputs for output in group if output.rounds]
    rounds = [pair for output in outputs for pair in counted_rounds(output)]
    emitted = np.array([len(output.tokens) - 1 for output in outputs], dtype=float)
    calls = np.array([len(output.rounds) for output in outputs], dtype=float)
    reached = [sum(p > i and a >= i for p, a in rounds) for i in range(count)]
    offered = [sum(p > i for p, a in rounds) for i in range(count)]
    stood = [sum(a > i for p, a in rounds) for i in range(count)]
    siblings = sum(output.siblings for output in outputs)
    proposed = sum(p for p, _ in rounds) + siblings
    return {
        "tokens_per_target_call": bootstrap_ratio(emitted, calls, seed=seed),
        "acceptance_rate": sum(a for _, a in rounds) / proposed if proposed else 0.0,
        "drafted": proposed,
        "siblings": siblings,
        "rounds": len(rounds),
        "rounds_by_proposed": [sum(p == n for p, _ in rounds) for n in range(count + 1)],
        "conditional_acceptance": [s / r if r else None for s, r in zip(stood, reached, strict=True)],
        "unconditional_acceptance": [s / o if o else None for s, o in zip(stood, offered, strict=True)],
    }


def counted_rounds(output: Output) -> list[tuple[int, int]]:
    """(proposed, accepted) of an output's rounds, without drafts that stood behind its end."""
    *whole, (proposed, accepted) = output.rounds
    emitted = accepted + 1 - output.truncated
    return [*whole, (min(proposed, emitted), min(accepted, emitted))]


def latencies(timing: Timing) -> dict[str, float]:
    """Milliseconds to the first token (TTFT) and per token after it (TPOT), median and 95th percentile over
    groups.
    """
    tokens = np.array(timing.decoded_tokens)
    per_token = np.array(timing.decode_seconds)[tokens > 0] / tokens[tokens > 0]
    result = {}
    for name, values in (("ttft_ms", np.array(timing.prefill_seconds)), ("tpot_ms", per_token)):
        result[f"{name}_p50"], result[f"{name}_p95"] = (1e3 * np.percentile(values, [50, 95])).tolist()
    return result


def measure_costs(
    target: Runner,
    drafter: ModelDrafter,
    counts: Sequence[int],
    batch_size: int,
    *,
    repeats: int = COST_REPEATS,
) -> dict[str, Any]:
    """Milliseconds of the forwards a round is made of, each at its true width, measured in turns; medians.

    The first draft step of a round is its kind's (a model's is two tokens wide, Medusa's gives all drafts at
    once), the others are like the second; a verify forward of n drafts is n + 1.
    `cost_ratio` is a draft step over a target step; `verify_overhead[n]` = verify / target step - 1.
    """

    def step(width: int) -> Callable[[], Any]:
        ids = torch.full((batch_size, width), 5, device=target.device)
        start = torch.full((batch_size,), min(TYPICAL_POSITION, target.length - width), device=target.device)

        def forward() -> Any:
            hidden = target.forward(ids, start, slice(0, batch_size))
            return target.logits(hidden).argmax(dim=-1)

        return forward

    first, following = drafter.timed_steps(batch_size, TYPICAL_POSITION)
    # In a round's order: the first draft step follows a target's, which took the drafter's weights out of the
    # processor's caches; the others follow it.
    steps = {"target": step(1), "first_draft": first, "draft": following}
    steps |= {f"verify_{count}": step(count + 1) for count in counts}
    seconds = interleaved_medians(steps, repeats)
    return {
        "target_step_ms": 1e3 * seconds["target"],
        "draft_step_ms": 1e3 * seconds["draft"],
        "first_draft_step_ms": 1e3 * seconds["first_draft"],
        "cost_ratio": seconds["draft"] / seconds["target"],
        "verify_overhead": {
            str(count): seconds[f"verify_{count}"] / seconds["target"] - 1 for count in counts
        },
    }


def interleaved_medians(steps: dict[str, Callable[[], Any]], repeats: int = COST_REPEATS) -> dict[str, float]:
    """Median seconds of each step; the steps take turns, so that a slow moment of the machine hits all of
    them.
    """
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(repeats + 2):
        for name, call in steps.items():
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            begin = time.perf_counter()
            call()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if repeat >= 2:  # the first rounds warm up
                taken[name].append(time.perf_counter() - begin)
    return {name: median(values) for name, values in taken.items()}


def predict_speedup(
    tokens_per_call: float,
    costs: dict[str, Any],
    rounds_by_proposed: Sequence[int],
    *,
    siblings: int = 0,
    cost_ratio: float | None = None,
) -> float:
    """Speedup that the cost model expects: tokens per target call over a round's mean cost in target steps.

    A round with n drafts costs 1 + c_first + (n - 1) c + v_n, the formula of Leviathan et al. 2023 (theorem
    3.8) with each cost at its true width; `rounds_by_proposed[n]` rounds had n drafts, and all together
    `siblings` beside them. `cost_ratio` asks for another drafter's c, 0 for a look-up (its first step then
    costs c too).
    """
    step = costs["cost_ratio"] if cost_ratio is None else cost_ratio
    first = costs["first_draft_step_ms"] / costs["target_step_ms"] if cost_ratio is None else cost_ratio
    overhead = costs["verify_overhead"]
    total: float = sum(
        rounds * (1 + (first + (drafts - 1) * step + overhead[str(drafts)] if drafts else 0))
        for drafts, rounds in enumerate(rounds_by_proposed)
    )
    total += siblings * sibling_cost(costs) if siblings else 0
    return tokens_per_call * sum(rounds_by_proposed) / total


def stop_threshold(costs: dict[str, Any]) -> float:
    """The chance of acceptance below which one more draft costs more than it saves.

    One more draft costs c and widens the verify forward, in target steps; accepted, it saves a token's time,
    which is 1 / speedup target steps.
    """
    overhead = costs["verify_overhead"]
    widest = max(map(int, overhead))
    marginal = costs["cost_ratio"] + overhead[str(widest)] / widest
    return float(min(0.9, marginal * ASSUMED_SPEEDUP))


def sibling_cost(costs: Mapping[str, Any]) -> float:
    """Target steps that a column beside the chain adds to the verify forward.

    The steepest mean slope from a step on: products of few rows get dearer in jumps, and a column more may
    be the one that jumps.
    """
    return max(added / int(width) for width, added in costs["verify_overhead"].items())


def sibling_threshold(costs: Mapping[str, Any]) -> float:
    """The chance of acceptance from which a sibling saves more than its column costs; accepted, it saves a
    token's time, as a draft does for `stop_threshold`, but it takes no draft step.

    From `CHAIN_FROM` on a chain is better than any tree, which is so in larger batches.
    """
    return max(RAREST_SIBLING, sibling_cost(costs) * ASSUMED_SPEEDUP)


@torch.inference_mode()
def transformers_tokens_per_second(
    model: PreTrainedModel, requests: Sequence[Request], eos_ids: Sequence[int]
) -> float:
    """Plain greedy decoding by transformers' `generate` with its static cache, batch 1: tokens/s after the
    first token.
    """
    tokens, seconds = 0, 0.0
    for number, request in enumerate([requests[0], *requests]):  # the first request also warms up
        prompt = torch.tensor([list(request.prompt)], device=model.device)
        spent = []
        for limit in (1, request.max_new_tokens):
            begin = time.perf_counter()
            output = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=limit,
                do_sample=False,
                eos_token_id=list(eos_ids),
                pad_token_id=eos_ids[0],
                cache_implementation="static",
            )
            spent.append(time.perf_counter() - begin)
        if number:
            tokens += output.shape[1] - prompt.shape[1] - 1
            seconds += max(spent[1] - spent[0], 1e-9)
    return tokens / seconds
