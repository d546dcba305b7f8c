"""The sampling stage: the target's own continuations of the recipe's prompts, over an engine handed in.

The plan of shards is fixed before the first token, so which samples exist never depends on timing or
interruption: a shard is a fixed group of prompts, and the stage ends with the shard that reaches the token
budget. A shard that is on disk is whole. Samples that an engine could not give are quarantined and counted.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from data.engines import Completion, Failure, SampleRequest, SamplingEngine
from data.errors import UserError
from data.files import write_json
from data.openai_api import EndpointConfig
from data.prompts import Prompt
from data.records import SampleRecord, read_records, shard_fault, shard_path, signals_path, write_shard
from data.sample_summary import quarantine_path, summarise, write_quarantine
from data.vllm_engine import VllmConfig

_log = logging.getLogger(__name__)

BATCHES_PER_SHARD = 4  # finished rows are refilled inside a shard; an interruption loses at most one
SUMMARY, PAGE = "samples.json", "samples.html"
_LOOK_SECONDS = 5  # between two looks at what other processes have done


class SampleConfig(BaseModel):
    """How the target is sampled."""

    model_config = ConfigDict(extra="forbid")

    engine: Literal["builtin", "openai", "vllm", "batch"] = "builtin"
    """`builtin` decodes here and keeps signals; `openai` asks a server; `vllm` runs vLLM in this process;
    `batch` hands requests over in a file and takes the answers from another."""
    temperature: list[float] = Field(default=[0.0, 1.0], min_length=1)
    """Prompts take turns, so a repeated entry gets a larger share; test prompts are sampled at each."""
    samples_per_prompt: int = Field(default=1, ge=1, le=1000)
    max_new_tokens: int = Field(ge=1, le=1_000_000)
    tokens: int = Field(ge=1, le=10**12)
    """Budget of completion tokens of the training split."""
    batch_size: int = Field(default=48, ge=1, le=100_000)
    endpoint: EndpointConfig | None = None
    """Who serves the target; for the engines `openai` and `batch`."""
    vllm: VllmConfig | None = None
    drafter: str | None = None
    """With `builtin`: sample through speculation with this drafter, `models:/NAME@ALIAS`, `shipped:NAME` or a
    folder. The samples are plain sampling's by the rule "shared_noise", whatever the drafter."""
    num_speculative_tokens: int = Field(default=3, ge=1)

    @field_validator("temperature")
    @classmethod
    def not_negative(cls, values: list[float]) -> list[float]:
        if any(value < 0 for value in values):
            raise ValueError("temperatures must be 0 or more")
        return values

    @model_validator(mode="after")
    def _engine_has_what_it_needs(self) -> SampleConfig:
        served = self.engine in ("openai", "batch")
        if served != (self.endpoint is not None):
            raise ValueError(
                f"engine {self.engine} needs an endpoint, with the target's name there as endpoint.model"
                if served
                else f"an endpoint is for the engines openai and batch: leave it out with {self.engine}"
            )
        if self.engine == "openai" and self.endpoint is not None and self.endpoint.url is None:
            raise ValueError("engine openai needs endpoint.url, such as http://127.0.0.1:8000/v1")
        if self.vllm is not None and self.engine != "vllm":
            raise ValueError(f"settings of vllm are for the engine vllm: leave them out with {self.engine}")
        if self.drafter is not None and self.engine != "builtin":
            raise ValueError(f"a drafter is for the engine builtin: leave it out with {self.engine}")
        return self

    def identity(self) -> dict[str, Any]:
        """What decides the samples, for the stage's key: options that are not in use are no part of it."""
        part = self.model_dump(mode="json", exclude={"endpoint", "vllm", "drafter", "num_speculative_tokens"})
        if self.endpoint is not None:
            part["endpoint"] = self.endpoint.identity()
        if self.drafter is not None:  # which one decides near ties alone, and is told by its digest
            part["rule"] = "shared_noise"
            part["num_speculative_tokens"] = self.num_speculative_tokens
        return part


@dataclass(frozen=True)
class PlannedSample:
    """One sample to draw."""

    prompt: Prompt
    ids: tuple[int, ...]
    temperature: float
    sample_index: int
    seed: int

    @property
    def request(self) -> SampleRequest:
        """What an engine is asked for it."""
        name = f"{self.prompt.id}-{self.sample_index}-{self.temperature:g}"
        return SampleRequest(self.ids, self.seed, name, self.prompt.messages)


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
    templates. Test prompts are sampled at every temperature; the others take turns. No prompt is answered at
    temperature 0 twice: the second answer would be the first, and count as evidence of its own.
    """

    def group(split: str, seen: bool) -> list[tuple[Prompt, Sequence[int]]]:
        return [item for item in prompts if item[0].split == split and item[0].seen_template == seen]

    turns, count = config.temperature, config.samples_per_prompt
    size = BATCHES_PER_SHARD * config.batch_size
    for split, seen in (("select", True), ("test", True), ("test", False), ("train", True)):
        chosen = group(split, seen)
        if split == "train":
            chosen.sort(key=lambda item: sample_seed(seed, item[0].id, 0))
        else:
            chosen = chosen[:held_out]
        planned = []
        for number, (prompt, ids) in enumerate(chosen):
            drawn = [(index, turns[(number + index) % len(turns)]) for index in range(count)]
            if split == "test":
                drawn = [(index, temperature) for index in range(count) for temperature in sorted(set(turns))]
            greedy = [index for index, temperature in drawn if temperature == 0][:1]
            planned += [
                PlannedSample(prompt, tuple(ids), temperature, index, sample_seed(seed, prompt.id, index))
                for index, temperature in drawn
                if temperature > 0 or index in greedy
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
) -> int:
    """Sample into `directory`, shard by shard, until the training split has `config.tokens` tokens; how many
    it has.

    `prompts` come with their token ids. Shards that are on disk are kept and counted. `on_tokens` hears the
    new tokens of the training split. Raises UserError when the training prompts end far below the budget.
    """
    directory.mkdir(parents=True, exist_ok=True)
    drop_damaged_shards(directory)
    total = 0
    for index, shard in enumerate(plan(prompts, config, held_out=held_out, seed=seed)):
        path = shard_path(directory, index)
        training = shard[0].prompt.split == "train"
        heard = on_tokens if training else _unheard
        if path.exists():
            count = sum(record.completion_tokens for record in read_records(path))
            heard(count)
        else:
            count = sample_shard(shard, engine, config, directory, index, heard)
        total += count if training else 0
        if total >= config.tokens:
            break
    drop_shards_after(directory, index)
    write_json(directory / SUMMARY, summarise(directory))
    if total < config.tokens // 2:
        raise UserError(
            f"the training prompts gave {total} completion tokens, under half of sample.tokens = "
            f"{config.tokens}: add prompts, raise samples_per_prompt or lower the budget."
        )
    return total


class _Enough(Exception):
    """The budget is reached by what other processes have sampled."""


def run_share(
    prompts: Sequence[tuple[Prompt, Sequence[int]]],
    engine: SamplingEngine,
    config: SampleConfig,
    *,
    held_out: int,
    seed: int,
    directory: Path,
    on_tokens: Callable[[int], None],
    share: int,
    shares: int,
) -> None:
    """One process's part of a sampling that `shares` processes do together: every `shares`-th shard of the
    one plan, from number `share` on, until the shards without a gap reach the budget. `run` then counts them
    all and takes away what was sampled ahead: the outcome is byte for byte that of one process with as many
    threads as each of these has. Shards that are there have to be whole (`drop_damaged_shards`).
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokens: list[int] = []  # of the training split, by shard, as far as there is no gap
    shards = list(plan(prompts, config, held_out=held_out, seed=seed))
    looked = time.monotonic()

    def enough() -> bool:
        while len(tokens) < len(shards) and (path := shard_path(directory, len(tokens))).exists():
            training = shards[len(tokens)][0].prompt.split == "train"
            records = read_records(path) if training else []
            tokens.append(sum(record.completion_tokens for record in records))
        return sum(tokens) >= config.tokens

    def heard(count: int) -> None:
        nonlocal looked
        on_tokens(count)
        if time.monotonic() - looked > _LOOK_SECONDS:
            looked = time.monotonic()
            if enough():
                raise _Enough

    with contextlib.suppress(_Enough):
        for index in range(share, len(shards), shares):
            if enough():
                break
            if not shard_path(directory, index).exists():
                training = shards[index][0].prompt.split == "train"
                sample_shard(shards[index], engine, config, directory, index, heard if training else _unheard)


def drop_damaged_shards(directory: Path) -> None:
    """Delete the shards that are not as they were written, to be sampled again."""
    for shard in sorted(directory.glob("samples-*.parquet")):
        if fault := shard_fault(shard):
            index = int(shard.stem.rpartition("-")[2])
            _log.warning("shard %d is damaged (%s), so it is sampled again", index, fault)
            shard.unlink()


def kept_tokens(directory: Path) -> int:
    """Completion tokens of the training split in the shards that are there."""
    shards = sorted(directory.glob("samples-*.parquet"))
    records = (record for shard in shards for record in read_records(shard))
    return sum(record.completion_tokens for record in records if record.split == "train")


def drop_shards_after(directory: Path, last: int) -> None:
    """Delete the shards past number `last`: a process may have sampled ahead of the end."""
    index = last + 1
    for shard in sorted(directory.glob("samples-*.parquet")):
        if shard >= shard_path(directory, index):
            for path in (shard, signals_path(shard), quarantine_path(shard)):
                path.unlink(missing_ok=True)


def _unheard(count: int) -> None:
    """Held-out tokens are no part of the budget that progress is shown of."""


def sample_shard(
    shard: list[PlannedSample],
    engine: SamplingEngine,
    config: SampleConfig,
    directory: Path,
    index: int,
    on_tokens: Callable[[int], None],
) -> int:
    """Sample one shard, a temperature at a time, and write it in planned order; its completion tokens.

    Samples that failed stand in the shard's quarantine instead. Raises UserError where all did.
    """
    results: dict[int, Completion | Failure] = {}
    for temperature in sorted(set(config.temperature)):
        places = [i for i, planned in enumerate(shard) if planned.temperature == temperature]
        requests = [shard[i].request for i in places]
        sampled = engine.sample(
            requests, temperature=temperature, max_new_tokens=config.max_new_tokens, on_tokens=on_tokens
        )
        results.update(zip(places, sampled, strict=True))
    records, signals, failed = [], [], []
    for place, planned in enumerate(shard):
        result = results[place]
        if isinstance(result, Failure):
            failed.append({"id": planned.request.id, "split": planned.prompt.split, "reason": result.reason})
            continue
        records.append(record_of(planned, result))
        if result.signals is not None:
            signals.append(result.signals)
    if not records:
        raise UserError(f"all {len(shard)} samples of a shard failed, the last with: {failed[-1]['reason']}")
    write_quarantine(quarantine_path(shard_path(directory, index)), failed)
    write_shard(directory, index, records, signals if len(signals) == len(records) else None)
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
        reencoded=completion.reencoded,
    )
