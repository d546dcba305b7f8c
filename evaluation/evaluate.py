"""The evaluation stage: acceptance, speed, losslessness and the cost model of one drafter, measure by measure
(`evaluation.measurements`).

Each measure is a JSON file of its own, so that an interrupted evaluation goes on with the next one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from data.files import write_json
from data.prompt_sources import is_template
from evaluation.measurements import SPLITS
from evaluation.verdict import verdict

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from evaluation.decoder.drafters import DraftModel
    from evaluation.measurements import Evaluation

OTHER_COST_RATIOS = (0.02, 0.05, 0.1, 0.2, 0.4)
BatchSize = Annotated[int, Field(ge=1, le=4096)]
Drafts = Annotated[int, Field(ge=1, le=128)]


class ServingConfig(BaseModel):
    """The mode that counts: it sets the loss default and the headline measure."""

    model_config = ConfigDict(extra="forbid")

    temperature: float = Field(default=0.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    draft_sampling: Literal["sampled", "argmax"] = "sampled"
    batch_size: BatchSize = 1


class EvaluateConfig(BaseModel):
    """How a drafter is measured."""

    model_config = ConfigDict(extra="forbid")

    prompts: int = Field(default=30, ge=2, le=1_000_000)
    """Test prompts per split: unseen fills of seen templates, and unseen templates."""
    num_speculative_tokens: list[Drafts] = Field(default=[4, 8], min_length=1)
    max_new_tokens: int = Field(default=64, ge=2, le=1_000_000)
    batch_sizes: list[BatchSize] = Field(default=[])
    """Batch sizes beside the serving one at which the K that the cost model thinks most of is measured too;
    it covers others unasked."""

    tree: bool = False
    """Whether the drafter races with trees too: second choices beside its chain, chosen by the costs."""

    @property
    def widest(self) -> int:
        """The most drafts that one forward checks: a tree has up to as many siblings as levels."""
        return self.num_speculative_tokens[-1] * (1 + self.tree)

    @field_validator("num_speculative_tokens", "batch_sizes")
    @classmethod
    def distinct(cls, values: list[int]) -> list[int]:
        if len(set(values)) < len(values):
            raise ValueError("give distinct numbers")
        return sorted(values)


def run(
    evaluation: Evaluation,
    before: DraftModel,
    *,
    machine: dict[str, Any],
    data_digest: str,
    directory: Path,
    on_group: Callable[[], None],
    full_target: Callable[[], PreTrainedModel] | None = None,
) -> dict[str, Any]:
    """Every measure not yet in `directory`, then `evaluation.json`, which is also returned.

    `before` is the drafter that training started from. `on_group` is called after every decoded group of
    prompts. `full_target` loads the full target where the evaluation's is a quantised one, for what that
    changes.
    """
    from evaluation.cost_model import best_count
    from evaluation.decoder.kinds import kind_of, own_weights

    def measure(name: str, compute: Callable[[], Any]) -> Any:
        path = directory / f"{name}.json"
        if not path.exists():
            write_json(path, compute())
        return json.loads(path.read_text())

    after = measure("acceptance", evaluation.acceptance)
    earlier = measure("acceptance-before", lambda: evaluation.acceptance_before(before))
    if evaluation.tree_is_static:
        evaluation.rates = measure("rank-rates", evaluation.rank_rates)
    costs = measure("costs", evaluation.costs)
    by_batch = measure("costs-by-batch", evaluation.costs_by_batch)
    theirs = measure("transformers-plain", evaluation.transformers_plain)

    serving = evaluation.serving
    by_batch = sorted([costs, *by_batch], key=lambda row: row["batch_size"])
    costs_of = {row["batch_size"]: row for row in by_batch}

    def decode(name: str, split: str, size: int, counts: Sequence[int]) -> dict[str, Any]:
        work = partial(evaluation.decode, split, costs_of[size], counts, on_group)
        decoded: dict[str, Any] = measure(name, work)
        return decoded

    counts = evaluation.config.num_speculative_tokens
    decoded = {split: decode(f"decode-{split}", split, serving.batch_size, counts) for split in SPLITS}
    rows = [row for part in decoded.values() for row in part["rows"]]
    speed = summarise_speed(decoded, costs, by_batch, evaluation.foretold(after["matches"]), theirs)
    headline = evaluation.headline_split()
    batches = []
    for size in evaluation.other_batch_sizes():
        best = best_count(speed["cost_model"]["table"], size)
        part = decode(f"decode-{headline}-batch-{size}", headline, size, [best])
        batches += [{**row, "predicted_speedup": predicted(row, costs_of[size])} for row in part["rows"]]
    replayed = measure("replay", lambda: evaluation.replay(after["matches"]))
    certificate = measure("certificate", lambda: evaluation.certificate(costs, rows))
    result = {
        "kind": kind_of(evaluation.drafter.model.config),
        "drafter_bytes": sum(weight.nbytes for weight in own_weights(evaluation.drafter, evaluation.model)),
        "machine": machine,
        "dtype": str(evaluation.model.dtype).removeprefix("torch."),
        "data_digest": data_digest,
        "templates": all(is_template(record.task, record.template) for record in evaluation.test),
        "serving": serving.model_dump(),
        "acceptance": after["rows"],
        "acceptance_before": earlier["rows"],
        "acceptance_curves": after["curves"],
        **speed,
        "batches": batches,
        "replay": replayed,
        "certificate": certificate,
    }
    if full_target is not None:
        load = full_target
        result["quantization"] = measure("quantization", lambda: evaluation.quantization_gap(load()))
    result["best"]["verdict"] = verdict(result)
    write_json(directory / "evaluation.json", result)
    return result


def summarise_speed(
    decoded: dict[str, dict[str, Any]],
    costs: dict[str, Any],
    by_batch: list[dict[str, Any]],
    foretold: dict[int, dict[str, float]],
    theirs: float | None,
) -> dict[str, Any]:
    """The decode rows over the fastest plain path, with predictions, the best K, and the cost model over K
    and batch size. `costs`: those of the serving batch size, which is one `by_batch`.
    """
    from evaluation.cost_model import predict, time_shares
    from evaluation.speed import sibling_threshold, stop_threshold

    ours = next(part["plain"]["tokens_per_second"] for part in decoded.values() if part["plain"])
    # Speedup is over the fastest plain path of this run, which need not be ours.
    handicap = min(1.0, ours / theirs) if theirs else 1.0
    rows = []
    for row in [row for part in decoded.values() for row in part["rows"]]:
        speedup = {key: value * handicap for key, value in row["speedup"].items()}
        plain = row["plain_tokens_per_second"] / handicap
        row = {**row, "speedup": speedup, "plain_tokens_per_second": plain}
        rows.append({**row, "predicted_speedup": handicap * predicted(row, costs)})
    # The headline is decided beforehand: picked by its measured speed, it would flatter itself.
    best, fixed = best_row(rows, "adaptive"), best_row(rows, "model")
    return {
        "decode": rows,
        "cost": {
            **costs,
            "stop_below": stop_threshold(costs),
            "sibling_above": sibling_threshold(costs),
            "time_shares": time_shares(costs, best["rounds_by_steps"], best["rounds_per_text"]),
        },
        "cost_model": predict(by_batch, foretold, {costs["batch_size"]: handicap}),
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
                str(ratio): handicap * predicted(best, costs, ratio) for ratio in OTHER_COST_RATIOS
            },
        },
    }


def predicted(row: Mapping[str, Any], costs: Mapping[str, Any], cost_ratio: float | None = None) -> float:
    """What the cost model makes of the rounds of a decode row, over plain decoding at its batch size;
    `cost_ratio` asks for another drafter's costs.
    """
    from evaluation.cost_model import predict_speedup

    return predict_speedup(
        row["tokens_per_target_call"]["mean"],
        costs,
        row["rounds_by_steps"],
        rounds_per_text=row["rounds_per_text"],
        columns_beside=row["columns_beside"] if cost_ratio is None else 0,
        cost_ratio=0.0 if row["drafter"] == "ngram" else cost_ratio,
    )


def best_row(rows: list[dict[str, Any]], drafter: str) -> dict[str, Any]:
    """The fastest row of a drafter on seen templates (on unseen ones where there are no seen)."""
    own = [row for row in rows if row["drafter"] == drafter]
    headline = [row for row in own if row["split"] == "seen"] or own
    return max(headline, key=lambda row: row["speedup"]["mean"])
