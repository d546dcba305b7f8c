"""The sampling stage: the target's own continuations of the recipe's prompts, over an engine handed in.

The plan of shards is fixed before the first token, so which samples exist never depends on timing or
interruption: a shard is a fixed group of prompts, and the stage ends with the shard that reaches the token
budget. A shard that is on disk is whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from data.engines import Completion, SampleRequest, SamplingEngine
from data.errors import UserError
from data.prompts import Prompt
from data.records import SampleRecord, read_records, shard_path, signals_path, write_shard

BATCHES_PER_SHARD = 4  # finished rows are refilled inside a shard; an interruption loses at most one


class SampleConfig(BaseModel):
    """How the target is sampled."""

    model_config = ConfigDict(extra="forbid")

    engine: Literal["builtin"] = "builtin"
    temperature: list[float] = Field(default=[0.0, 1.0], min_length=1)
    """Prompts take turns, so a repeated entry gets a larger share; test prompts are sampled at each."""
    samples_per_prompt: int = Field(default=1, ge=1)
    max_new_tokens: int = Field(ge=1)
    tokens: int = Field(ge=1)
    """Budget of completion tokens of the training split."""
    batch_size: int = Field(default=48, ge=1)

    @field_validator("temperature")
    @classmethod
    def not_negative(cls, values: list[float]) -> list[float]:
        if any(value < 0 for value in values):
            raise ValueError("temperatures must be 0 or more")
        return values


@dataclass(frozen=True)
class PlannedSample:
    """One sample to draw."""

    prompt: Prompt
    ids: tuple[int, ...]
    temperature: float
    sample_index: int
    seed: int


def sample_seed(seed: int, prompt_id: str, sample_index: int) -> int:
    """A 63-bit seed of (recipe seed, prompt, sample): its randomness is its own, whatever the batch."""
    digest = hashlib.sha256(f"{seed}/{prompt_id}/{sample_index}".encode()).digest()
    return int.from_bytes(digest[:8]) >> 1


def plan(
    prompts: Sequence[tuple[Prompt, Sequence[int]]], config: SampleConfig, *, held_out: int, seed: int
) -> Iterator[list[PlannedSample]]:
    """Shards of planned samples, each of one split: the held-out ones first, then the training split in
    seeded order.

    `held_out` prompts each are taken for selection, for the test on seen and for the test on unseen
    templates. Test prompts are sampled at every temperature; the others take turns.
    """

    def group(split: str, seen: bool) -> list[tuple[Prompt, Sequence[int]]]:
        return [item for item in prompts if item[0].split == split and item[0].seen_template == seen]

    turns = config.temperature
    size = BATCHES_PER_SHARD * config.batch_size
    for split, seen in (("select", True), ("test", True), ("test", False), ("train", True)):
        chosen = group(split, seen)
        if split == "train":
            chosen.sort(key=lambda item: sample_seed(seed, item[0].id, 0))
        else:
            chosen = chosen[:held_out]
        planned = [
            PlannedSample(prompt, tuple(ids), temperature, index, sample_seed(seed, prompt.id, index))
            for number, (prompt, ids) in enumerate(chosen)
            for index in range(config.samples_per_prompt)
            for temperature in (
                sorted(set(turns)) if split == "test" else [turns[(number + index) % len(turns)]]
            )
        ]
        for first in range(0, len(planned), size):
            yield planned[first : first + size]


def run(
    prompts: Sequence[tuple[Prompt, Sequence[int]]],
    engine: SamplingEngine,
    config: SampleConfig,
    *,
    held_out: int,
    seed: int,
    directory: Path,
    on_tokens: Callable[[int], None],
    elsewhere: Sequence[Path] = (),
) -> int:
    """Sample into `directory`, shard by shard, until the training split has `config.tokens` tokens; how many
    it has.

    `prompts` come with their token ids. Shards that are on disk are kept and counted, and so are those of
    finished samplings `elsewhere` that had the same plan: it does not depend on the budget. `on_tokens` hears
    the new tokens of the training split. Raises UserError when the training prompts end far below the budget.
    """
    directory.mkdir(parents=True, exist_ok=True)
    total = 0
    for index, shard in enumerate(plan(prompts, config, held_out=held_out, seed=seed)):
        path = shard_path(directory, index)
        training = shard[0].prompt.split == "train"
        heard = on_tokens if training else _unheard
        if not path.exists():
            adopt_shard(directory, index, elsewhere)
        if path.exists():
            count = sum(record.completion_tokens for record in read_records(path))
            heard(count)
        else:
            count = sample_shard(shard, engine, config, directory, index, heard)
        total += count if training else 0
        if total >= config.tokens:
            return total
    if total < config.tokens // 2:
        raise UserError(
            f"the training prompts gave {total} completion tokens, under half of sample.tokens = "
            f"{config.tokens}: add prompts, raise samples_per_prompt or lower the budget."
        )
    return total


def _unheard(count: int) -> None:
    """Held-out tokens are no part of the budget that progress is shown of."""


def adopt_shard(directory: Path, index: int, elsewhere: Sequence[Path]) -> None:
    """Link shard `index` of another sampling into `directory`, where one of `elsewhere` has it."""
    for folder in elsewhere:
        shard = shard_path(folder, index)
        if shard.exists():
            for path in (signals_path(shard), shard):  # the shard is whole once its records are there
                if path.exists():
                    (directory / path.name).unlink(missing_ok=True)
                    (directory / path.name).hardlink_to(path)
            return


def sample_shard(
    shard: list[PlannedSample],
    engine: SamplingEngine,
    config: SampleConfig,
    directory: Path,
    index: int,
    on_tokens: Callable[[int], None],
) -> int:
    """Sample one shard, a temperature at a time, and write it in planned order; its completion tokens."""
    completions: dict[int, Completion] = {}
    for temperature in sorted(set(config.temperature)):
        places = [i for i, planned in enumerate(shard) if planned.temperature == temperature]
        requests = [SampleRequest(shard[i].ids, shard[i].seed) for i in places]
        sampled = engine.sample(
            requests, temperature=temperature, max_new_tokens=config.max_new_tokens, on_tokens=on_tokens
        )
        completions.update(zip(places, sampled, strict=True))
    ordered = [completions[i] for i in range(len(shard))]
    records = [record_of(planned, done) for planned, done in zip(shard, ordered, strict=True)]
    signals = [done.signals for done in ordered if done.signals is not None]
    write_shard(directory, index, records, signals if len(signals) == len(ordered) else None)
    return sum(record.completion_tokens for record in records)


def record_of(planned: PlannedSample, completion: Completion) -> SampleRecord:
    """The record of a planned sample and its completion."""
    prompt = planned.prompt
    return SampleRecord(
        prompt_id=prompt.id,
        task=prompt.task,
        template=prompt.template,
        split=prompt.split,
        seen_template=prompt.seen_template,
        sample_index=planned.sample_index,
        temperature=planned.temperature,
        seed=planned.seed,
        input_ids=[*planned.ids, *completion.tokens],
        completion_mask=[False] * len(planned.ids) + [True] * len(completion.tokens),
        finish_reason=completion.finish_reason,
    )
