"""The page about a data set of samples: how long the target's answers are and how they end, on which tasks,
and how open its choices were. One self-contained HTML file, a pure function of the samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from data.records import Samples
from data.sample_summary import sample_notes
from evaluation.acceptance_curves import ENTROPY_EDGES, target_entropy
from evaluation.figures import COLOURS, HATCHES, Plot, finish, new_figure
from evaluation.head import Head
from evaluation.report import render_page
from evaluation.tables import TextTable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ENTROPY_SAMPLES = 32
"""Samples whose tokens the entropy is taken of: each token costs a product with the target's whole head."""
_BINS = 16


def entropy_summary(samples: Samples, head_VH: Head | Tensor, temperature: float) -> dict[str, Any]:
    """Entropy in nats of the target's choices at `temperature`, over some samples spread evenly over all.

    `tokens`, `mean`, `median`, `p95`, and `shares`: how much of the tokens lies between two edges. `samples`
    must carry hidden states.
    """
    chosen = range(0, len(samples), math.ceil(len(samples) / ENTROPY_SAMPLES))
    values = np.concatenate(target_entropy(head_VH, samples.pick(list(chosen)), temperature))
    counts, _ = np.histogram(values, bins=ENTROPY_EDGES)
    return {
        "tokens": len(values),
        "temperature": temperature,
        "mean": round(float(values.mean()), 3),
        "median": round(float(np.median(values)), 3),
        "p95": round(float(np.quantile(values, 0.95)), 3),
        "shares": {
            f"{low:g}": round(int(count) / len(values), 4)
            for low, count in zip(ENTROPY_EDGES, counts, strict=False)
        },
    }


def sample_page(
    samples: Samples, summary: dict[str, Any], name: str, tokenizer: PreTrainedTokenizerBase
) -> str:
    """The page about `samples`, whose figures are `summary` (see `data.sample_summary.summarise`)."""
    notes = sample_notes(summary)
    entropy = summary.get("entropy")
    if entropy is None:
        notes.append("The entropy of the target's choices is not known: no hidden states were kept.")
    else:
        notes.append(
            f"Entropy of the target's choices at temperature {entropy['temperature']:g}: mean "
            f"{entropy['mean']:.2f} nats, median {entropy['median']:.2f}, p95 {entropy['p95']:.2f}, over "
            f"{entropy['tokens']:,} tokens of samples spread evenly over all."
        )
    groups: dict[str, Any] = {each: summary[each] for each in ("train", "select", "test") if each in summary}
    plots = [plot_lengths(samples), *([plot_entropy(entropy)] if entropy else [])]
    return render_page(
        title=f"Samples of {name}",
        subtitle="What the target answered, and what the drafter is trained and tested on",
        verdict=notes[0] + ".",
        standing="unclear",
        mark="",
        notes=notes[1:],
        plots=plots,
        tables=[
            ("Splits", _table("Samples by split", "split", groups)),
            ("Tasks", _table("Samples by task", "task", summary["by_task"])),
            ("Ends", end_table(summary["all"], tokenizer)),
        ],
        certificate="",
        recipe="",
        origin="distill sample",
    )


def plot_lengths(samples: Samples) -> Plot:
    """How many tokens answers have, those cut at max_new_tokens apart."""
    lengths = {
        name: [record.completion_tokens for record in samples if (record.finish_reason == "stop") == ended]
        for name, ended in (("end by themselves", True), ("cut at max_new_tokens", False))
    }
    longest = max(max(values, default=1) for values in lengths.values())
    edges = np.unique(np.linspace(1, longest + 1, _BINS + 1).round().astype(int))
    counts = {name: np.histogram(values, bins=edges)[0] for name, values in lengths.items()}
    figure, axes = new_figure()
    below = np.zeros(len(edges) - 1, dtype=int)
    for number, (name, heights) in enumerate(counts.items()):
        axes.bar(
            edges[:-1],
            heights,
            np.diff(edges),
            bottom=below,
            align="edge",
            color=COLOURS[number],
            hatch=HATCHES[number],
            edgecolor="white",
            label=name,
        )
        below = below + heights
    axes.set_xlabel("tokens of the answer")
    axes.set_ylabel("samples")
    rows = [
        [f"{low}-{high - 1}", *(int(counts[name][number]) for name in counts)]
        for number, (low, high) in enumerate(pairwise(edges))
    ]
    return finish(figure, axes, "lengths", "Length of answers", ["tokens", *counts], rows)


def plot_entropy(entropy: Mapping[str, Any]) -> Plot:
    """How open the target's choices were: 0.05 nats is all but certain, 2 one of seven."""
    labels, shares = list(entropy["shares"]), list(entropy["shares"].values())
    figure, axes = new_figure()
    axes.bar(range(len(labels)), shares, 0.8, color=COLOURS[0], edgecolor="white")
    axes.set_xticks(range(len(labels)), [f"from {label}" for label in labels])
    axes.set_xlabel("entropy of the target's choice, nats")
    axes.set_ylabel("share of tokens")
    rows = [list(pair) for pair in zip(labels, shares, strict=True)]
    return finish(figure, axes, "entropy", "How open the target's choices are", ["from", "share"], rows)


def _table(title: str, what: str, groups: Mapping[str, Mapping[str, Any]]) -> TextTable:
    """A row per group of samples."""
    rows = [
        (
            name,
            f"{group['samples']:,}",
            f"{group['prompts']:,}",
            f"{group['completion_tokens']:,}",
            *(str(group["length"][rank]) for rank in ("min", "median", "p95", "max")),
            f"{group['truncated_share']:.1%}",
            f"{group['empty_share']:.1%}",
        )
        for name, group in groups.items()
    ]
    heading = (what, "samples", "prompts", "tokens", "min", "median", "p95", "max", "cut", "empty")
    return TextTable(title, heading, 1, rows)


def end_table(whole: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> TextTable:
    """Which tokens end the answers."""
    rows: list[tuple[str, ...]] = [
        (repr(tokenizer.decode([int(token)])), token, f"{count:,}", f"{count / whole['samples']:.1%}")
        for token, count in whole["eos"].items()
    ]
    rows.append(("cut at max_new_tokens", "-", f"{whole['truncated']:,}", f"{whole['truncated_share']:.1%}"))
    heading = ("ends with", "id", "samples", "share")
    return TextTable("The last token, over all samples", heading, 1, rows)
