"""A race of drafters as Markdown: of `distill bench kinds` a page, of any race a table per batch size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distill.bench.race import STOPS, TREE

Rows = Sequence[dict[str, Any]]


def report(found: dict[str, Any]) -> str:
    """The race as a Markdown page: the drafters, then a table per batch size."""
    machine = found["environment"]
    lines = [
        f"{found['prompts']} test prompts of known templates, {found['new_tokens']} tokens each, "
        f"{found['samples']} training samples; {found['target']} on {machine['cpu']}, "
        f"commit {machine['commit']}.",
        "",
        "| recipe | kind | training minutes | tokens trained on | a minute | weights beside the target's |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    drafters = {(row["drafter"], row["kind"]): row for row in found["rows"] if row["drafter"]}
    lines += [
        f"| {name} | {row['kind']} | {_training(row)} | {row['megabytes']:.1f} MB |"
        for (name, _), row in drafters.items()
    ]
    lines += tables(found["rows"])
    return "\n".join(lines) + "\n"


def tables(rows: Rows) -> list[str]:
    """A table per batch size, the fastest first."""
    lines = []
    for size in sorted({row["batch_size"] for row in rows}):
        own = [row for row in rows if row["batch_size"] == size]
        lines += [
            "",
            f"Batch {size}, plain decoding {own[0]['plain_tokens_per_second']:.1f} tokens/s:",
            "",
            "| drafter | K | acceptance by position | tokens per target call | cost of the first draft | "
            "of each further one | predicted | measured speedup |",
            "| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |",
        ]
        lines += [_line(row) for row in sorted(own, key=lambda row: -row["speedup"]["mean"])]
        lines += ["", *_chain_or_tree(own)]
    return lines


def _training(row: dict[str, Any]) -> str:
    """Minutes, tokens, and tokens a minute."""
    minutes, tokens = row["training_minutes"], row["trained_tokens"]
    return (
        f"- | {tokens:,} | -" if minutes is None else f"{minutes:.1f} | {tokens:,} | {tokens / minutes:,.0f}"
    )


def _chain_or_tree(rows: Rows) -> list[str]:
    """What the cost model says of each drafter's second choices at one batch size."""
    from evaluation.cost_model import chain_or_tree
    from evaluation.speed import CHAIN_FROM

    found = {(row["drafter"], row["kind"]): row for row in rows if row["drafter"]}
    return [
        f"- {name}: {chain_or_tree([{**row, 'chain': row['sibling_above'] >= CHAIN_FROM}])}"
        for (name, _), row in found.items()
    ]


def _line(row: dict[str, Any]) -> str:
    from evaluation.tables import number

    tokens, gain = row["tokens_per_target_call"], row["speedup"]
    by_position = " ".join(number(value) for value in row["conditional_acceptance"])
    return (
        f"| {row['drafter'] or row['kind']} | "
        f"{_shape(row)} | "
        f"{by_position} | "
        f"{tokens['mean']:.2f} [{tokens['low']:.2f}, {tokens['high']:.2f}] | "
        f"{number(row['first_cost_ratio'])} | {number(row['cost_ratio'])} | "
        f"{number(row['predicted_speedup'])} | "
        f"{gain['mean']:.2f} [{gain['low']:.2f}, {gain['high']:.2f}] |"
    )


def _shape(row: dict[str, Any]) -> str:
    """How many drafts a round."""
    count = row["num_speculative_tokens"]
    if row["mode"] == TREE:
        return f"tree of up to {count} levels, {row['siblings_per_round']:.1f} siblings a round"
    return f"{'up to ' * (row['mode'] == STOPS)}{count}"
