"""Is speculative output the target's own? Greedy identity with every first divergence explained, and the
certificate without which no drafter is promoted.

The certificate has three parts: greedy outputs are plain decoding's (near ties named), sampled outputs follow
the target's law (`evaluation.sampled_law`; plain decoding is tested beside them as the control), and the
target as its own drafter is accepted. Each says how much it looked at, and the sampled part the smallest
difference that it could have seen.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from evaluation import sampled_law
from evaluation.decoder.drafters import Drafter, DraftModel, ModelDrafter
from evaluation.decoder.engine import Decoder, Request
from evaluation.decoder.kinds import make_drafter
from evaluation.decoder.runner import Runner
from evaluation.decoder.sampling import SamplingOptions

Verdict = Literal["identical", "near_tie", "bug"]
NOISE_MARGIN = (
    4.0  # a gap within this many times the measured noise is a tie that rounding may break either way
)
PROMPTS = 4
TEXTS = 16  # sampled continuations per prompt, decoded as one batch
LENGTH = 25  # tokens of each: one from the prefill and 12 pairs
SELF_DRAFT_LENGTH = 24
ALPHA = 1e-3  # each of the four p-values of a correct decoder falls below once in a thousand certificates
SELF_ACCEPTANCE = 0.98  # in float32, the bar of vLLM's own test
HALF_PRECISION_SELF_ACCEPTANCE = 0.9  # forwards of two widths round apart: near ties at some positions


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
    wide = target.logits(target.prefill([context], 0, [0]))[0]
    target.prefill([context[:-1]], 0, [0])
    single = target.logits(target.prefill([context[-1:]], 0, [len(context) - 1]))[0]
    noise = float((wide - single).abs().max())
    # Both must be near the best: two hopeless ids that are near each other are no tie
    behind = float(single.max() - torch.minimum(single[plain[shared]], single[speculative[shared]]))
    return "near_tie" if behind <= NOISE_MARGIN * noise else "bug"


def count_verdicts(verdicts: Sequence[Verdict]) -> dict[str, int]:
    """How many outputs are plain decoding's, how many part at a near tie, how many by a bug."""
    return {
        "identical_outputs": verdicts.count("identical"),
        "near_ties": verdicts.count("near_tie"),
        "bugs": verdicts.count("bug"),
    }


@dataclass
class DecodingPath:
    """The decoding path to certify: a target with a drafter, its draft rule, K and early stopping."""

    target: PreTrainedModel
    drafter: DraftModel
    num_speculative_tokens: int
    argmax: bool
    stop_below: float
    prompts: list[list[int]]
    """Token ids of up to PROMPTS prompts that the texts continue."""

    def __post_init__(self) -> None:
        self.prompts = self.prompts[:PROMPTS]
        length = max(map(len, self.prompts)) + LENGTH + self.num_speculative_tokens + 1
        self.runner = Runner(self.target, TEXTS, length)

    def model_drafter(self, options: SamplingOptions) -> Drafter:
        """The drafter under test."""
        return make_drafter(
            self.drafter, self.runner, options, argmax=self.argmax, stop_below=self.stop_below, int8=True
        )

    def decoder(self, options: SamplingOptions, drafter: Drafter | None = None) -> Decoder:
        """A decoder without end-of-sequence ids: every text has its full length."""
        count = self.num_speculative_tokens if drafter else 0
        return Decoder(
            self.runner, eos_ids=[], options=options, drafter=drafter, num_speculative_tokens=count
        )


def certify(
    path: DecodingPath, options: SamplingOptions, greedy: Mapping[str, int] | None, *, seed: int
) -> dict[str, Any]:
    """The certificate as plain data: `holds`, `reasons` (why not), and the three parts.

    `options`: how the sampled part samples; where the serving mode is greedy, at temperature 1. `greedy`: the
    verdicts on the evaluation prompts where they were compared already; else PROMPTS prompts are decoded.
    """
    begin = time.perf_counter()
    assert not options.greedy
    parts = {
        "greedy": dict(greedy) if greedy else greedy_identity(path),
        "sampled": sampled(path, options, seed=seed),
        "self_draft": self_draft(path, options),
    }
    reasons = failures(parts)
    seconds = round(time.perf_counter() - begin, 3)
    return {"holds": not reasons, "reasons": reasons, "seconds": seconds, **parts}


def greedy_identity(path: DecodingPath) -> dict[str, int]:
    """Greedy texts with the drafter against plain ones: verdicts by kind, and their number."""
    options = SamplingOptions()
    requests = [Request(prompt, LENGTH) for prompt in path.prompts]
    plain = path.decoder(options).generate(requests)
    speculative = path.decoder(options, path.model_drafter(options)).generate(requests)
    verdicts = [
        compare_greedy(path.runner, request, a.tokens, b.tokens)
        for request, a, b in zip(requests, plain, speculative, strict=True)
    ]
    return {"outputs": len(verdicts), **count_verdicts(verdicts)}


def sampled(path: DecodingPath, options: SamplingOptions, *, seed: int) -> dict[str, Any]:
    """Sampled texts with the drafter against the target's law and against plain texts, with plain texts
    against plain ones as the control.
    """
    drafter = path.model_drafter(options)
    speculative = _texts(path, path.decoder(options, drafter), options, seed=seed)
    plain = _texts(path, path.decoder(options), options, seed=seed + 1)
    first, second = _halves(plain)
    pairs = int(speculative.pairs().sum())
    leak = sampled_law.smallest_leak(speculative.draft_shares(), pairs, ALPHA)
    return {
        "temperature": options.temperature,
        "top_p": options.top_p,
        "draft": "argmax" if path.argmax else "sampled",
        "num_speculative_tokens": path.num_speculative_tokens,
        "prompts": len(path.prompts),
        "tokens": int(speculative.uniforms.numel()),
        "pairs": pairs,
        "cells": sampled_law.CELLS**2,
        "law_p_value": sampled_law.law_p_value(speculative.pairs()),
        "plain_p_value": sampled_law.same_law_p_value(speculative.pairs(), plain.pairs()),
        "control_p_value": sampled_law.same_law_p_value(first.pairs(), second.pairs()),
        "control_law_p_value": sampled_law.law_p_value(plain.pairs()),
        "alpha": ALPHA,
        "power": sampled_law.POWER,
        "smallest_leak": leak,
        "smallest_distance": leak * speculative.distance,
    }


def _texts(
    path: DecodingPath, decoder: Decoder, options: SamplingOptions, *, seed: int
) -> sampled_law.Scored:
    parts = []
    for number, prompt in enumerate(path.prompts):
        first = (seed * PROMPTS + number) * TEXTS
        outputs = decoder.generate([Request(prompt, LENGTH, first + text) for text in range(TEXTS)])
        texts = [output.tokens for output in outputs]
        parts.append(
            sampled_law.score(
                path.target, path.drafter, prompt, texts, options, argmax=path.argmax, seed=first
            )
        )
    return sampled_law.merge(parts)


def _halves(scored: sampled_law.Scored) -> tuple[sampled_law.Scored, sampled_law.Scored]:
    """Every second text and the others."""
    return tuple(  # type: ignore[return-value]
        sampled_law.Scored(scored.uniforms[start::2], scored.draft_uniforms[start::2], scored.distance)
        for start in (0, 1)
    )


def self_draft(path: DecodingPath, options: SamplingOptions) -> dict[str, Any]:
    """The target as its own drafter, greedily and sampled: the share of its drafts that is accepted, which is
    all of them up to rounding.
    """
    requests = [Request(prompt, SELF_DRAFT_LENGTH, number) for number, prompt in enumerate(path.prompts)]
    found: dict[str, Any] = {}
    for name, mode in (("greedy", SamplingOptions()), ("sampled", options)):
        drafter = ModelDrafter(DraftModel(path.target), path.runner, mode)
        outputs = path.decoder(mode, drafter).generate(requests)
        rounds = [pair for output in outputs for pair in output.rounds]
        found[name] = sum(accepted for _, accepted in rounds) / sum(proposed for proposed, _ in rounds)
        found["drafted"] = found.get("drafted", 0) + sum(proposed for proposed, _ in rounds)
    whole = path.target.dtype in (torch.float32, torch.float64)
    return {**found, "required": SELF_ACCEPTANCE if whole else HALF_PRECISION_SELF_ACCEPTANCE}


def failures(parts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Why the certificate does not hold, a sentence per reason; empty where it does."""
    found = []
    if bugs := parts["greedy"]["bugs"]:
        found.append(f"{bugs} of {parts['greedy']['outputs']} greedy outputs differ by more than a near tie.")
    law = parts["sampled"]
    if min(law["control_p_value"], law["control_law_p_value"]) < ALPHA:
        found.append(
            "Plain decoding itself fails the test of sampled texts, so that test proves nothing here."
        )
    for name, what in (("law_p_value", "the target's law"), ("plain_p_value", "plain decoding")):
        if law[name] < ALPHA:
            found.append(f"Sampled texts differ from {what}: p = {law[name]:.2g}, below {ALPHA:g}.")
    own = parts["self_draft"]
    for mode in ("greedy", "sampled"):
        if own[mode] < own["required"]:
            share = f"{own[mode]:.1%} of its own {mode} drafts, below {own['required']:.0%}"
            found.append(f"The target accepts only {share}.")
    return found


def describe(certificate: Mapping[str, Any]) -> str:
    """The certificate in sentences."""
    greedy, law, own = (certificate[name] for name in ("greedy", "sampled", "self_draft"))
    verdict = "Lossless" if certificate["holds"] else "NOT lossless: " + " ".join(certificate["reasons"])
    ties = f" ({greedy['near_ties']} part at a near tie)" if greedy["near_ties"] else ""
    return (
        f"{verdict}{'.' if certificate['holds'] else ''} "
        f"Greedy: {greedy['identical_outputs']} of {greedy['outputs']} outputs equal plain decoding{ties}. "
        f"Sampled at temperature {law['temperature']:g}: {law['tokens']:,} tokens, "
        f"p = {law['law_p_value']:.2g} against the target's law and {law['plain_p_value']:.2g} against plain "
        f"decoding (plain against plain: {law['control_p_value']:.2g}); {law['smallest_leak']:.0%} of tokens "
        f"leaking from the draft, a total variation of {law['smallest_distance']:.3f}, would have been seen "
        f"with {law['power']:.0%} certainty. "
        f"Self-draft: {own['greedy']:.1%} greedy and {own['sampled']:.1%} sampled drafts accepted."
    )
