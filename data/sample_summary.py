"""What a sampling stage holds, in figures: `samples.json`, and the quarantine of samples that failed.

A pure function of the shards, so it is the same however often sampling was interrupted.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data.files import write_atomic
from data.records import SampleRecord, read_records


def quarantine_path(shard: Path) -> Path:
    """Where the failed samples of a shard stand."""
    return shard.with_name(shard.name.replace("samples", "quarantine")).with_suffix(".jsonl")


def write_quarantine(path: Path, failed: Sequence[dict[str, str]]) -> None:
    """One line per failed sample: its id, split and reason. Without any there is no file."""
    if failed:
        write_atomic(path, "".join(json.dumps(row) + "\n" for row in failed))
    else:
        path.unlink(missing_ok=True)


def summarise(directory: Path) -> dict[str, Any]:
    """Counts over all shards, and over those of each split and task: see `describe`; then the quarantine by
    reason.
    """
    groups: dict[str, list[SampleRecord]] = {"all": []}
    by_task: dict[str, list[SampleRecord]] = {}
    for path in sorted(directory.glob("samples-*.parquet")):
        for record in read_records(path):
            groups["all"].append(record)
            groups.setdefault(record.split, []).append(record)
            by_task.setdefault(record.task, []).append(record)
    failed = [
        json.loads(line)
        for path in sorted(directory.glob("quarantine-*.jsonl"))
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    return {
        **{name: describe(records) for name, records in groups.items()},
        "by_task": {task: describe(records) for task, records in sorted(by_task.items())},
        "quarantined": len(failed),
        "quarantine_reasons": dict(Counter(row["reason"] for row in failed).most_common(10)),
    }


def describe(records: Sequence[SampleRecord]) -> dict[str, Any]:
    """Counts and lengths of some samples, and how their answers end.

    `truncated`: ended by max_new_tokens. `empty`: nothing but the end-of-sequence token. `eos`: by id, how
    often an answer ends with it. Shares are over samples.
    """
    lengths = sorted(record.completion_tokens for record in records)
    stopped = [record for record in records if record.finish_reason == "stop"]
    count = max(1, len(records))
    empty = sum(record.completion_tokens == 1 for record in stopped)
    return {
        "samples": len(records),
        "prompts": len({record.prompt_id for record in records}),
        "prompt_tokens": sum(len(record.input_ids) for record in records) - sum(lengths),
        "completion_tokens": sum(lengths),
        "length": {name: _quantile(lengths, share) for name, share in _QUANTILES.items()},
        "truncated": len(records) - len(stopped),
        "truncated_share": round((len(records) - len(stopped)) / count, 4),
        "empty": empty,
        "empty_share": round(empty / count, 4),
        "eos": {
            str(token): number
            for token, number in sorted(Counter(record.input_ids[-1] for record in stopped).items())
        },
        "reencoded": sum(record.reencoded for record in records),
        "temperatures": {
            f"{temperature:g}": number
            for temperature, number in sorted(Counter(record.temperature for record in records).items())
        },
    }


def sample_metrics(summary: dict[str, Any]) -> dict[str, float]:
    """The figures of a summary that are worth comparing between runs."""
    whole = summary["all"]
    named = ("truncated_share", "empty_share", "reencoded")
    return {f"sample/{name}": whole[name] for name in named} | {"sample/quarantined": summary["quarantined"]}


def sample_notes(summary: dict[str, Any]) -> list[str]:
    """What a user should know about the samples, in sentences."""
    whole = summary["all"]
    notes = [
        f"{whole['samples']:,} samples, {whole['completion_tokens']:,} tokens; "
        f"{whole['truncated_share']:.1%} end at max_new_tokens, {whole['empty_share']:.1%} are empty"
    ]
    if whole["reencoded"]:
        notes.append(
            f"WARNING: {whole['reencoded']:,} of {whole['samples']:,} answers came as text and were encoded "
            "again (marked `reencoded`): their ids may differ from those the target chose"
        )
    if summary["quarantined"]:
        reason, count = next(iter(summary["quarantine_reasons"].items()))
        failed = f"{summary['quarantined']:,} samples failed and are quarantined"
        notes.append(f"{failed}; {count:,} with: {reason}")
    return notes


def summary_lines(summary: dict[str, Any]) -> list[str]:
    """The summary for reading, a line per matter."""
    whole = summary["all"]
    splits = [name for name in ("train", "select", "test") if name in summary]
    lines = [
        *sample_notes(summary),
        "splits: " + ", ".join(f"{name} {summary[name]['samples']:,}" for name in splits),
        "tasks: " + ", ".join(f"{task} {each['samples']:,}" for task, each in summary["by_task"].items()),
        "tokens an answer: " + ", ".join(f"{name} {value}" for name, value in whole["length"].items()),
        "ended by id: " + (", ".join(f"{id_} {count:,}" for id_, count in whole["eos"].items()) or "none"),
    ]
    if entropy := summary.get("entropy"):
        lines.append(
            f"entropy of the target's choices at temperature {entropy['temperature']:g}: mean "
            f"{entropy['mean']:.2f} nats, median {entropy['median']:.2f}, p95 {entropy['p95']:.2f}, over "
            f"{entropy['tokens']:,} tokens"
        )
    return lines


def budget_notes(tokens: int, budget: int) -> list[str]:
    """That the training prompts ended before the budget, where they did."""
    if tokens >= budget:
        return []
    return [
        f"the training prompts ended at {tokens:,} of sample.tokens = {budget:,}: add prompts or raise "
        "sample.samples_per_prompt for more"
    ]


_QUANTILES = {"min": 0.0, "median": 0.5, "p95": 0.95, "max": 1.0}


def _quantile(ascending: Sequence[int], share: float) -> int:
    return ascending[round(share * (len(ascending) - 1))] if ascending else 0
