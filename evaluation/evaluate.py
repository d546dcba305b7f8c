"""The evaluation stage: acceptance, speed, losslessness and the cost model of one drafter, measure by
measure.

Each measure is a JSON file of its own, so that an interrupted evaluation goes on with the next one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from data.files import write_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from data.records import Samples
    from evaluation.decoder.drafters import DraftModel
    from evaluation.decoder.engine import Decoder, Request
    from evaluation.decoder.runner import Runner

SPLITS = ("seen", "unseen")
TRANSFORMERS_PROMPTS = 3  # transformers' plain path is slow and varies little: a few prompts place it
ACCEPTANCE_BATCH = 16
OTHER_COST_RATIOS = (0.02, 0.05, 0.1, 0.2, 0.4)


class ServingConfig(BaseModel):
    """The mode that counts: it sets the loss default and the headline measure."""

    model_config = ConfigDict(extra="forbid")

    temperature: float = Field(default=0.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    draft_sampling: Literal["sampled", "argmax"] = "sampled"
    batch_size: int = Field(default=1, ge=1)


class EvaluateConfig(BaseModel):
    """How a drafter is measured."""

    model_config = ConfigDict(extra="forbid")

    prompts: int = Field(default=30, ge=2)
    """Test prompts per split: unseen fills of seen templates, and unseen templates."""
    num_speculative_tokens: list[int] = Field(default=[4, 8], min_length=1)
    max_new_tokens: int = Field(default=64, ge=2)

    @field_validator("num_speculative_tokens")
    @classmethod
    def positive_and_distinct(cls, values: list[int]) -> list[int]:
        if any(value < 1 for value in values) or len(set(values)) < len(values):
            raise ValueError("give distinct numbers of drafted tokens, each 1 or more")
        return sorted(values)


class Evaluation:
    """One target, one drafter and the test samples, ready to be measured."""

    def __init__(
        self,
        target: PreTrainedModel,
        eos_ids: Sequence[int],
        drafter: DraftModel,
        test: Samples,
        config: EvaluateConfig,
        serving: ServingConfig,
        seed: int,
    ) -> None:
        from evaluation.decoder.drafters import ModelDrafter
        from evaluation.decoder.runner import Runner
        from evaluation.decoder.sampling import SamplingOptions

        self.model, self.eos_ids, self.drafter, self.test = target, eos_ids, drafter, test
        self.config, self.serving, self.seed = config, serving, seed
        self.options = SamplingOptions(serving.temperature, serving.top_p)
        longest = max(sum(not bit for bit in record.completion_mask) for record in test)
        length = longest + config.max_new_tokens + max(config.num_speculative_tokens) + 1
        self.runner: Runner = Runner(target, serving.batch_size, length)
        self.argmax = serving.draft_sampling == "argmax"
        self.model_drafter = ModelDrafter(drafter, self.runner, self.options, argmax=self.argmax, int8=True)

    def acceptance(self, drafter: DraftModel) -> list[dict[str, Any]]:
        """The three teacher-forced acceptances of `drafter` on the test samples, by split, temperature and
        task.
        """
        from evaluation.acceptance import summarise, teacher_forced
        from evaluation.signals import target_signals

        head = self.model.get_output_embeddings().weight.detach()
        temperature = self.serving.temperature or 1.0
        live = partial(target_signals, self.model, temperature=temperature)
        table = teacher_forced(
            drafter,
            head,
            self.test,
            temperature=temperature,
            batch_size=ACCEPTANCE_BATCH,
            signals=None if self.test.has_signals else live,
        )
        return summarise(table, list(self.test), seed=self.seed)

    def groups(self, split: str) -> list[list[Request]]:
        """The test prompts of a split, in groups that fill one batch."""
        from evaluation.decoder.engine import Request

        requests: dict[str, Request] = {}
        for record in self.test.where(seen_template=split == "seen"):
            prompt = [i for i, bit in zip(record.input_ids, record.completion_mask, strict=True) if not bit]
            requests.setdefault(record.prompt_id, Request(prompt, self.config.max_new_tokens, record.seed))
        chosen = list(requests.values())[: self.config.prompts]
        size = self.serving.batch_size
        return [chosen[first : first + size] for first in range(0, len(chosen), size)]

    def decoders(self, stop_below: float) -> dict[str, Decoder]:
        """The decoders that race, over one target runner, by drafter and K.

        Plain decoding; the drafter with K drafts a round, for every K; "adaptive": the same drafter with up
        to the largest K, that stops where going on would not pay (`stop_below`); n-gram look-up at the
        smallest K.
        """
        from evaluation.decoder.drafters import ModelDrafter, NgramDrafter
        from evaluation.decoder.engine import Decoder

        def decoder(drafter: Any, count: int) -> Decoder:
            return Decoder(
                self.runner,
                eos_ids=self.eos_ids,
                options=self.options,
                drafter=drafter,
                num_speculative_tokens=count,
            )

        counts = self.config.num_speculative_tokens
        found = {"plain": decoder(None, 0)}
        found |= {f"model {count}": decoder(self.model_drafter, count) for count in counts}
        adaptive = ModelDrafter(
            self.drafter,
            self.runner,
            self.options,
            argmax=self.argmax,
            stop_below=stop_below,
            int8=True,
        )
        found[f"adaptive {counts[-1]}"] = decoder(adaptive, counts[-1])
        return found | {f"ngram {counts[0]}": decoder(NgramDrafter(), counts[0])}

    def decode(self, split: str, stop_below: float, on_group: Callable[[], None]) -> dict[str, Any]:
        """Plain and speculative decoding of a split, interleaved: one row per drafter and K, and the plain
        latencies.
        """
        from evaluation.speed import drafting, latencies, race, speedup

        groups = self.groups(split)
        if not groups:
            return {"plain": None, "rows": []}
        timings = race(self.decoders(stop_below), groups, on_group)
        plain = timings.pop("plain")
        rows = []
        for name, timing in timings.items():
            kind, count = name.split()
            rows.append(
                {
                    "drafter": kind,
                    "split": split,
                    "num_speculative_tokens": int(count),
                    "prompts": sum(map(len, groups)),
                    **drafting(timing, int(count), seed=self.seed),
                    **self.identity(groups, plain.outputs, timing.outputs),
                    "tokens_per_second": timing.tokens_per_second,
                    "plain_tokens_per_second": plain.tokens_per_second,
                    "speedup": speedup(plain, timing, seed=self.seed),
                    **latencies(timing),
                }
            )
        return {"plain": {"tokens_per_second": plain.tokens_per_second, **latencies(plain)}, "rows": rows}

    def identity(self, groups: list[list[Request]], plain: Any, speculative: Any) -> dict[str, int | None]:
        """At temperature 0: how many outputs are plain decoding's, how many part at a near tie, how many by a
        bug.
        """
        from evaluation.lossless import compare_greedy

        if not self.options.greedy:
            return {"identical_outputs": None, "near_ties": None, "bugs": None}
        verdicts = [
            compare_greedy(self.runner, request, a.tokens, b.tokens)
            for requests, first, second in zip(groups, plain, speculative, strict=True)
            for request, a, b in zip(requests, first, second, strict=True)
        ]
        return {
            "identical_outputs": verdicts.count("identical"),
            "near_ties": verdicts.count("near_tie"),
            "bugs": verdicts.count("bug"),
        }

    def costs(self) -> dict[str, Any]:
        """The forwards of a round, timed alone."""
        from evaluation.speed import measure_costs

        return measure_costs(
            self.runner, self.model_drafter, self.config.num_speculative_tokens, self.serving.batch_size
        )

    def transformers_plain(self) -> float | None:
        """Tokens/s of transformers' own static-cache decoding, None where the serving mode has no counterpart
        there.
        """
        from evaluation.speed import transformers_tokens_per_second

        if not self.options.greedy or self.serving.batch_size > 1:
            return None
        groups = self.groups("seen") or self.groups("unseen")
        requests = [request for group in groups for request in group][:TRANSFORMERS_PROMPTS]
        return transformers_tokens_per_second(self.model, requests, self.eos_ids)


def run(
    evaluation: Evaluation,
    before: DraftModel,
    *,
    machine: dict[str, Any],
    data_digest: str,
    directory: Path,
    on_group: Callable[[], None],
) -> dict[str, Any]:
    """Every measure not yet in `directory`, then `evaluation.json`, which is also returned.

    `before` is the drafter that training started from. `on_group` is called after every decoded group of
    prompts.
    """

    from evaluation.speed import stop_threshold

    def measure(name: str, compute: Callable[[], Any]) -> Any:
        path = directory / f"{name}.json"
        if not path.exists():
            write_json(path, compute())
        return json.loads(path.read_text())

    acceptance = measure("acceptance", lambda: evaluation.acceptance(evaluation.drafter))
    acceptance_before = measure("acceptance-before", lambda: evaluation.acceptance(before))
    costs = measure("costs", evaluation.costs)
    theirs = measure("transformers-plain", evaluation.transformers_plain)
    threshold = stop_threshold(costs)
    decoded = {
        split: measure(f"decode-{split}", partial(evaluation.decode, split, threshold, on_group))
        for split in SPLITS
    }
    result = {
        "machine": machine,
        "data_digest": data_digest,
        "serving": evaluation.serving.model_dump(),
        "acceptance": acceptance,
        "acceptance_before": acceptance_before,
        **summarise_speed(decoded, costs, theirs),
    }
    write_json(directory / "evaluation.json", result)
    return result


def summarise_speed(
    decoded: dict[str, dict[str, Any]], costs: dict[str, Any], theirs: float | None
) -> dict[str, Any]:
    """The decode rows over the fastest plain path, with predictions, the best K, and the verdict in a
    sentence.
    """
    from evaluation.speed import predict_speedup, stop_threshold

    ours = next(part["plain"]["tokens_per_second"] for part in decoded.values() if part["plain"])
    # Speedup is over the fastest plain path of this run, which need not be ours.
    handicap = min(1.0, ours / theirs) if theirs else 1.0
    rows = []
    for row in [row for part in decoded.values() for row in part["rows"]]:
        row = {**row, "speedup": {key: value * handicap for key, value in row["speedup"].items()}}
        tokens, rounds = row["tokens_per_target_call"]["mean"], row["rounds_by_proposed"]
        free = 0.0 if row["drafter"] == "ngram" else None
        row["predicted_speedup"] = handicap * predict_speedup(tokens, costs, rounds, cost_ratio=free)
        rows.append(row)
    # The headline is decided beforehand: picked by its measured speed, it would flatter itself.
    best, fixed = best_row(rows, "adaptive"), best_row(rows, "model")
    tokens, rounds = best["tokens_per_target_call"]["mean"], best["rounds_by_proposed"]
    return {
        "decode": rows,
        "cost": {**costs, "stop_below": stop_threshold(costs)},
        "plain": {
            "ours": ours,
            "transformers_static": theirs,
            "fastest": "transformers_static" if theirs and theirs > ours else "ours",
            "latency": {split: part["plain"] for split, part in decoded.items()},
        },
        "best": {
            "drafter": best["drafter"],
            "num_speculative_tokens": best["num_speculative_tokens"],
            "fixed_num_speculative_tokens": fixed["num_speculative_tokens"],
            "split": best["split"],
            "speedup": best["speedup"],
            "predicted_speedup_at_cost_ratio": {
                str(ratio): handicap * predict_speedup(tokens, costs, rounds, cost_ratio=ratio)
                for ratio in OTHER_COST_RATIOS
            },
            "verdict": verdict(best),
        },
    }


def best_row(rows: list[dict[str, Any]], drafter: str) -> dict[str, Any]:
    """The fastest row of a drafter on seen templates (on unseen ones where there are no seen)."""
    own = [row for row in rows if row["drafter"] == drafter]
    headline = [row for row in own if row["split"] == "seen"] or own
    return max(headline, key=lambda row: row["speedup"]["mean"])


def verdict(best: dict[str, Any]) -> str:
    """What to do with this drafter on this machine, in a sentence."""
    speedup, count = best["speedup"], best["num_speculative_tokens"]
    if best.get("bugs"):
        return f"Do not serve: {best['bugs']} outputs differ from plain decoding by more than a near tie."
    measured = f"{speedup['mean']:.2f}x, 95 % interval {speedup['low']:.2f}-{speedup['high']:.2f}"
    if speedup["low"] > 1:
        return f"Serve with up to {count} drafts a round: {measured} over plain decoding."
    if speedup["high"] < 1:
        return f"Do not speculate on this machine: at best {measured} of plain decoding's speed."
    return f"No clear gain on this machine: {measured} over plain decoding."
