"""The decoder against its peers: transformers' generate and assisted generation, llama.cpp, and the parts of
its own rounds.

All decode the same prompts greedily, a fixed number of tokens each, in turns. A ratio is a peer's seconds
over ours, with a bootstrap interval over prompts (over batches, where there are several rows in one). The
seconds are those of prompt and answer together; beside llama.cpp, which tells the two apart, the answer's.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from distill.bench.sampling_peers import generate_padded
from evaluation.acceptance import bootstrap_ratio
from evaluation.cost_model import predict_speedup, round_cost
from evaluation.decoder.drafters import DraftModel, ModelDrafter
from evaluation.decoder.engine import Decoder, Request
from evaluation.decoder.guard import Guard
from evaluation.decoder.runner import Runner
from evaluation.decoder.sampling import SamplingOptions
from evaluation.speed import measure_costs

GREEDY = SamplingOptions()
NO_EOS = -1  # no id: every contender makes as many tokens
BATCH = 16
BATCH_REPEATS = 4  # groups of a batch are few


@dataclass(frozen=True)
class Bench:
    """What is compared: models, prompts of token ids, answers of `new_tokens` each, K drafts a round."""

    target: PreTrainedModel
    drafter: DraftModel
    served_drafter: PreTrainedModel
    """The same drafter as other programs take it, with the target's whole vocabulary."""
    prompts: Sequence[Sequence[int]]
    new_tokens: int
    num_speculative_tokens: int
    seed: int
    eos_ids: Sequence[int] = ()
    """Where llama.cpp's answers end, and ours beside them; the other contenders go on."""

    def runner(self, batch_size: int) -> Runner:
        """The target with room for every prompt."""
        longest = max(map(len, self.prompts))
        return Runner(self.target, batch_size, longest + self.new_tokens + self.num_speculative_tokens + 1)

    def groups(self, batch_size: int) -> list[list[Request]]:
        """The prompts, in whole batches."""
        requests = [Request(prompt, self.new_tokens) for prompt in self.prompts]
        whole = len(requests) // batch_size * batch_size
        return [requests[first : first + batch_size] for first in range(0, whole, batch_size)]

    def ratio(self, theirs: list[float], ours: list[float]) -> dict[str, float]:
        """Their seconds over ours, paired: mean, low and high."""
        return bootstrap_ratio(np.array(theirs), np.array(ours), seed=self.seed)


@dataclass
class Record:
    """What one contender took and made, group by group."""

    seconds: list[float] = field(default_factory=list)
    decode_seconds: list[float] = field(default_factory=list)
    """Of the answers alone; ours only."""
    tokens: list[list[list[int]]] = field(default_factory=list)
    rounds: list[tuple[int, int]] = field(default_factory=list)
    """(proposed, accepted) drafts; ours only."""


Contender = Callable[[Sequence[Request], Record], list[list[int]]]


def ours(
    runner: Runner,
    drafter: ModelDrafter | None = None,
    count: int = 0,
    guard: Guard | None = None,
    eos_ids: Sequence[int] = (),
) -> Contender:
    """Our decoder, plain or with a drafter."""
    decoder = Decoder(
        runner, eos_ids=eos_ids, options=GREEDY, drafter=drafter, num_speculative_tokens=count, guard=guard
    )

    def decode(group: Sequence[Request], record: Record) -> list[list[int]]:
        outputs = decoder.generate(group)
        record.decode_seconds.append(decoder.decode_seconds)
        record.rounds += [pair for output in outputs for pair in output.rounds]
        return [output.tokens for output in outputs]

    return decode


def transformers(model: PreTrainedModel, **arguments: Any) -> Contender:
    """transformers' generate, over a batch padded on the left."""

    def decode(group: Sequence[Request], record: Record) -> list[list[int]]:
        return generate_padded(
            model,
            [request.prompt for request in group],
            max_new_tokens=group[0].max_new_tokens,
            do_sample=False,
            eos_token_id=NO_EOS,
            **arguments,
        )

    return decode


def assisted(bench: Bench) -> Contender:
    """transformers' assisted generation, with as many drafts a round as ours and no stopping early."""
    settings = bench.served_drafter.generation_config
    settings.num_assistant_tokens = bench.num_speculative_tokens
    settings.num_assistant_tokens_schedule = "constant"
    settings.assistant_confidence_threshold = 0.0
    return transformers(bench.target, assistant_model=bench.served_drafter)


def take_turns(
    contenders: dict[str, Contender], groups: Sequence[Sequence[Request]], say: Callable[[str], None]
) -> dict[str, Record]:
    """Every contender on every group, in rotating order, after a warm-up on the first."""
    names = list(contenders)
    for name in names:
        contenders[name](groups[0], Record())
    records = {name: Record() for name in names}
    for number, group in enumerate(groups):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            begin = time.perf_counter()
            tokens = contenders[name](group, records[name])
            records[name].seconds.append(time.perf_counter() - begin)
            records[name].tokens.append(tokens)
        say(f"bench decoder: batch {len(group)}, {number + 1} of {len(groups)}")
    return records


def single(bench: Bench, say: Callable[[str], None]) -> dict[str, Any]:
    """One prompt at a time: against transformers and our own plain decoding, and the parts of a round."""
    count = bench.num_speculative_tokens
    runner = bench.runner(1)
    drafter = ModelDrafter(bench.drafter, runner, GREEDY, int8=True)
    hopeless = ModelDrafter(shuffled(bench.drafter), runner, GREEDY, int8=True)
    costs = measure_costs(runner, drafter, range(1, count + 1), 1)
    guard = Guard([round_cost(costs, drafts) for drafts in range(count + 1)])
    records = take_turns(
        {
            "plain": ours(runner),
            "speculative": ours(runner, drafter, count),
            "guarded_random": ours(runner, hopeless, count, guard),
            "transformers": transformers(bench.target),
            "transformers_static_cache": transformers(
                bench.target, cache_implementation="static", disable_compile=True
            ),
            "transformers_assisted": assisted(bench),
        },
        bench.groups(1),
        say,
    )
    plain, speculative = records["plain"], records["speculative"]
    measured = bench.ratio(plain.decode_seconds, speculative.decode_seconds)
    return {
        "tokens_per_second": tokens_per_second(records),
        "plain_vs_transformers_generate": bench.ratio(records["transformers"].seconds, plain.seconds),
        "plain_vs_transformers_static_cache": bench.ratio(
            records["transformers_static_cache"].seconds, plain.seconds
        ),
        "speculative_vs_transformers_assisted": bench.ratio(
            records["transformers_assisted"].seconds, speculative.seconds
        ),
        "guarded_random_drafter_vs_plain": bench.ratio(plain.seconds, records["guarded_random"].seconds),
        "speculative_vs_plain": measured,
        **round_figures(speculative, costs, count, measured["mean"]),
        "answers_equal_to_plain": {
            name: sum(a == b for a, b in zip(record.tokens, plain.tokens, strict=True))
            for name, record in records.items()
        },
    }


def round_figures(record: Record, costs: dict[str, Any], count: int, measured: float) -> dict[str, Any]:
    """A round's time against its parts timed alone, and the measured speedup against the predicted one."""
    emitted = sum(len(tokens) - 1 for group in record.tokens for tokens in group)
    by_proposed = [sum(proposed == drafts for proposed, _ in record.rounds) for drafts in range(count + 1)]
    parts = sum(rounds * round_cost(costs, drafts) for drafts, rounds in enumerate(by_proposed))
    per_call = emitted / len(record.rounds)
    predicted = predict_speedup(per_call, costs, by_proposed)
    seconds = sum(record.decode_seconds)
    return {
        "tokens_per_target_call": per_call,
        "predicted_speedup": predicted,
        "measured_over_predicted_speedup": measured / predicted,
        "round_ms": 1e3 * seconds / len(record.rounds),
        "round_overhead": 1e3 * seconds / (parts * costs["target_step_ms"]) - 1,
        "costs": costs,
    }


def batched(bench: Bench, say: Callable[[str], None]) -> dict[str, Any]:
    """Full batches: plain and speculative decoding against transformers' generate."""
    runner = bench.runner(BATCH)
    drafter = ModelDrafter(bench.drafter, runner, GREEDY, int8=True)
    records = take_turns(
        {
            "plain": ours(runner),
            "speculative": ours(runner, drafter, bench.num_speculative_tokens),
            "transformers": transformers(bench.target),
        },
        bench.groups(BATCH) * BATCH_REPEATS,
        say,
    )
    plain = records["plain"]
    return {
        "tokens_per_second": tokens_per_second(records),
        "plain_vs_transformers_generate": bench.ratio(records["transformers"].seconds, plain.seconds),
        "speculative_vs_plain": bench.ratio(plain.seconds, records["speculative"].seconds),
    }


def tokens_per_second(records: dict[str, Record]) -> dict[str, float]:
    """New tokens over all seconds, prompts included."""
    return {
        name: sum(len(tokens) for group in record.tokens for tokens in group) / sum(record.seconds)
        for name, record in records.items()
    }


def shuffled(drafter: DraftModel) -> DraftModel:
    """A drafter that costs as much and knows nothing: its head's rows stand in random order."""
    model = copy.deepcopy(drafter.model)
    head = model.get_output_embeddings()
    order = torch.randperm(len(head.weight), generator=torch.Generator().manual_seed(0))
    head.weight = torch.nn.Parameter(head.weight.detach()[order], requires_grad=False)
    return DraftModel(model, drafter.vocab)
