"""Speed measured side by side: decoders take turns on the same prompts, and the cost model says what they
should reach.

All ratios come from one run on one machine. Seconds are wall clock; prefill (time to first token) is kept
apart.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from evaluation.acceptance import bootstrap_ratio
from evaluation.decoder.drafters import ModelDrafter
from evaluation.decoder.engine import Decoder, Output, Request
from evaluation.decoder.graphs import Graphs
from evaluation.decoder.runner import Runner

COST_REPEATS = 15
TYPICAL_POSITION = 128
ASSUMED_SPEEDUP = 1.5  # where the decision to draft on matters most: neither hopeless nor certain
RAREST_SIBLING = 0.02  # at least so likely; ranks from 50 on are not looked at
CHAIN_FROM = 0.5  # no token but the drafter's first choice can be more likely


@dataclass
class Timing:
    """What one decoder answered, in the order of the requests, how many rounds took so many draft steps, and
    how many columns beside the longest path they checked together.
    """

    outputs: list[Output] = field(default_factory=list)
    rounds_by_steps: Counter[int] = field(default_factory=Counter)
    columns_beside: int = 0

    @property
    def tokens(self) -> list[int]:
        """Tokens of each answer after its first, which the prefill gives."""
        return [len(output.tokens) - 1 for output in self.outputs]

    @property
    def seconds(self) -> list[float]:
        """What decoding them took: of every round its share. In a full batch they add up to the time in which
        so many tokens are served.
        """
        return [output.seconds.share for output in self.outputs]

    @property
    def tokens_per_second(self) -> float:
        return sum(self.tokens) / max(sum(self.seconds), 1e-9)


def race(
    decoders: dict[str, Decoder], groups: Sequence[Sequence[Request]], on_group: Callable[[], None]
) -> dict[str, Timing]:
    """Decode every group with every decoder, taking turns in rotating order after a warm-up; the timings by
    name. Batches are kept full: what is measured is steady load, not how a batch runs empty.
    """
    timings = {name: Timing() for name in decoders}
    names = list(decoders)
    for decoder in decoders.values():
        warm_up(decoder, groups[0])
    for number, group in enumerate(groups):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            timings[name].outputs += decoders[name].generate(group, keep_full=True)
            timings[name].rounds_by_steps += decoders[name].rounds_by_steps
            timings[name].columns_beside += decoders[name].columns_beside
        on_group()
    return timings


def warm_up(decoder: Decoder, group: Sequence[Request]) -> None:
    """Eight tokens of each row; where rounds are captured, all of them twice: a graph is taken when its shape
    comes for the second time, and that should not be timed.
    """
    if decoder.graphs is None:
        decoder.generate([Request(r.prompt, min(8, r.max_new_tokens), r.seed) for r in group])
        return
    for _ in range(2):
        decoder.generate(group, keep_full=True)


def speedup(plain: Timing, speculative: Timing, *, seed: int) -> dict[str, float]:
    """Speculative over plain tokens/s, paired by prompt, with a 95 % bootstrap interval over prompts.

    The ratio of total seconds per token; where both give the same tokens (temperature 0) it is the ratio of
    seconds. Prompts that shared a batch shared its rounds too, so the interval is a little narrow there.
    """
    plain_tokens, draft_tokens = np.array(plain.tokens), np.array(speculative.tokens)
    # Answers that end with their first token have nothing to time.
    timed = (plain_tokens > 0) & (draft_tokens > 0)
    same_work = np.array(plain.seconds)[timed] / plain_tokens[timed] * draft_tokens[timed]
    return bootstrap_ratio(same_work, np.array(speculative.seconds)[timed], seed=seed)


def drafting(timing: Timing, count: int, *, seed: int) -> dict[str, Any]:
    """Tokens per target call and acceptance by position of a speculative decoder, from its rounds.

    `conditional_acceptance[i]`: accepted at position i among the rounds that proposed it and accepted all
    before it; `unconditional_acceptance[i]`: among all rounds that proposed it. `siblings` of the `drafted`
    tokens stood beside a tree's longest path; `columns_beside` counts those of each round's widest row.
    Tokens per target call include the bonus token and not the prefill's token; the interval is a bootstrap
    over rows.
    """
    outputs = [output for output in timing.outputs if output.rounds]
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
        "columns_beside": timing.columns_beside,
        "rounds": len(rounds),
        "rounds_per_text": len(rounds) / max(len(outputs), 1),
        "rounds_by_steps": [timing.rounds_by_steps[steps] for steps in range(count + 1)],
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
    answers. Waiting for a slot, or for the prefill of others, is in neither.
    """
    first = [output.seconds.prefill for output in timing.outputs]
    after = [
        output.seconds.decode / (len(output.tokens) - 1)
        for output in timing.outputs
        if len(output.tokens) > 1
    ]
    result = {}
    for name, values in (("ttft_ms", first), ("tpot_ms", after)):
        result[f"{name}_p50"], result[f"{name}_p95"] = (1e3 * np.percentile(values, [50, 95])).tolist()
    return result


def measure_costs(
    target: Runner,
    drafter: ModelDrafter,
    counts: Sequence[int],
    batch_size: int,
    *,
    repeats: int = COST_REPEATS,
    prompt_tokens: int = TYPICAL_POSITION,
) -> dict[str, Any]:
    """Milliseconds of the forwards a round is made of, each at its true width, measured in turns; medians.
    And of what a row costs once: the drafter reads its prompt of `prompt_tokens`, by itself.

    The first draft step of a round is its kind's (a model's is two tokens wide, Medusa's gives all drafts at
    once), the others are like the second; a verify forward of n drafts is n + 1.
    `cost_ratio` is a draft step over a target step; `verify_overhead[n]` = verify / target step - 1.
    """

    def step(width: int) -> Callable[[], Any]:
        ids = torch.full((batch_size, width), 5, device=target.device)
        position = min(TYPICAL_POSITION, target.length - width)
        start = torch.full((batch_size,), position, device=target.device)
        window = target.window(position + width)

        def forward() -> Any:
            hidden = target.forward(ids, start, slice(0, batch_size), window=window)
            return target.logits(hidden).argmax(dim=-1)

        return forward

    first, following = drafter.timed_steps(batch_size, TYPICAL_POSITION)
    # In a round's order: the first draft step follows a target's, which took the drafter's weights out of the
    # processor's caches; the others follow it.
    steps = {"target": step(1), "first_draft": first, "draft": following}
    steps |= {f"verify_{count}": step(count + 1) for count in counts}
    if target.device.type == "cuda":  # as rounds run there
        graphs: Graphs[Any] = Graphs()
        steps = {name: partial(graphs, name, call) for name, call in steps.items()}
    steps["reading"] = drafter.timed_reading(prompt_tokens)
    seconds = interleaved_medians(steps, repeats)
    return {
        "batch_size": batch_size,
        "target_step_ms": 1e3 * seconds["target"],
        "draft_step_ms": 1e3 * seconds["draft"],
        "first_draft_step_ms": 1e3 * seconds["first_draft"],
        "draft_reading_ms": 1e3 * seconds["reading"],
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


def verify_overhead(costs: Mapping[str, Any], drafts: float) -> float:
    """What checking so many drafts adds to a target step, interpolated between the measured widths."""
    measured = sorted((int(width), added) for width, added in costs["verify_overhead"].items())
    widths, added = zip((0, 0.0), *measured, strict=True)
    return float(np.interp(drafts, widths, added))


def node_prices(costs: Mapping[str, Any]) -> list[float]:
    """What trees of 0, 1, 2 ... nodes must bring in accepted tokens to be worth their verify forward, up to
    the widest that was measured: an accepted token saves a token's time, as for `stop_threshold`.
    """
    widest = max(map(int, costs["verify_overhead"]))
    return [ASSUMED_SPEEDUP * verify_overhead(costs, nodes) for nodes in range(widest + 1)]


def stop_threshold(costs: Mapping[str, Any]) -> float:
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
                disable_compile=True,  # on a GPU it would compile inside the timing, for every cache length
            )
            spent.append(time.perf_counter() - begin)
        if number:
            tokens += output.shape[1] - prompt.shape[1] - 1
            seconds += max(spent[1] - spent[0], 1e-9)
    return tokens / seconds
