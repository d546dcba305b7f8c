"""`distill show`: the samples in figures, and one as the training stage sees it, with what is trained marked.

What is masked wrongly is trained wrongly without a word: here it can be seen. The first token of the answer
and the end-of-sequence token must both be trained.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from data.errors import UserError
from data.records import SampleRecord, open_samples
from data.sample import PAGE, SUMMARY
from data.sample_summary import summarise, summary_lines
from distill.context import Run
from distill.recipe import Recipe
from distill.stages import Say


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of a sample that are all trained, or all not."""

    trained: bool
    ids: list[int]
    tokens: list[str]
    text: str


def show(recipe: Recipe, runs_dir: Path, index: int, say: Say) -> dict[str, Any]:
    """What the recipe's finished or half-done sampling stage holds, and its sample number `index` in pieces;
    as plain data.

    Raises `UserError` where nothing is sampled yet, or there is no such sample.
    """
    with ExitStack() as stack:
        run = Run(recipe, runs_dir, say, stack)
        folder = run.stages["sample"].directory
        if not any(folder.glob("samples-*.parquet")):
            raise UserError(f"{recipe.name} has no samples in {folder}: run `distill sample {recipe.name}`")
        samples = open_samples(folder)
        if not -len(samples) <= index < len(samples):
            raise UserError(f"--index {index}: the samples are numbered 0 to {len(samples) - 1}")
        record = samples[index]
        summary = _summary(folder)
        pieces = pieces_of(record, run.tokenizer)
        ends = bool(record.finish_reason == "stop" and record.input_ids[-1] in run.eos_ids)
    return {
        "index": index % len(samples),
        "samples": len(samples),
        "prompt_id": record.prompt_id,
        "split": record.split,
        "task": record.task,
        "template": record.template,
        "seen_template": record.seen_template,
        "temperature": record.temperature,
        "finish_reason": record.finish_reason,
        "reencoded": record.reencoded,
        "trained_tokens": record.completion_tokens,
        "ends_with_trained_eos": ends and record.completion_mask[-1],
        "pieces": [vars(piece) for piece in pieces],
        "summary": summary,
        "page": str(folder / PAGE) if (folder / PAGE).exists() else None,
    }


def _summary(folder: Path) -> dict[str, Any]:
    """What stands written where the stage is finished, else made now of the shards that are there."""
    if (folder / PAGE).exists():
        written: dict[str, Any] = json.loads((folder / SUMMARY).read_text("utf-8"))
        return written
    return summarise(folder)


def pieces_of(record: SampleRecord, tokenizer: Any) -> list[Piece]:
    """The sample's tokens, cut where training begins or ends."""
    pieces = []
    for trained, group in groupby(
        zip(record.input_ids, record.completion_mask, strict=True), key=lambda pair: pair[1]
    ):
        ids = [token for token, _ in group]
        tokens = [tokenizer.decode([token]) for token in ids]
        pieces.append(Piece(trained, ids, tokens, tokenizer.decode(ids)))
    return pieces


def render(answer: dict[str, Any]) -> str:
    """What `show` found, for reading: all in figures, then the sample, its trained tokens between bars."""
    facts = [
        answer["split"],
        f"task {answer['task']}",
        f"template {answer['template']}{'' if answer['seen_template'] else ' (held out)'}",
        f"temperature {answer['temperature']:g}",
        _ending(answer),
    ]
    if answer["reencoded"]:
        facts.append("ENCODED AGAIN")
    lines = summary_lines(answer["summary"])
    if answer["page"]:
        lines.append(f"page: {answer['page']}")
    lines.append(f"sample {answer['index']} of {answer['samples']}: {', '.join(facts)}")
    for piece in answer["pieces"]:
        count = len(piece["ids"])
        if piece["trained"]:
            lines += [f"--- {count} tokens, trained", _barred(piece["tokens"])]
        else:
            lines += [f"--- {count} tokens, not trained", piece["text"]]
    return "\n".join(lines)


def _ending(answer: dict[str, Any]) -> str:
    if answer["finish_reason"] != "stop":
        return "cut at max_new_tokens"
    return "ends by itself" if answer["ends_with_trained_eos"] else "ends by itself, WITHOUT A TRAINED EOS"


def _barred(tokens: Sequence[str]) -> str:
    return "|" + "|".join(token.replace("\n", "\\n\n") for token in tokens) + "|"
