"""The page about samples: entropy against its definition, figures that add up, nothing from outside."""

import json
import math
import re
from pathlib import Path

import pytest
import torch

from data.records import SampleRecord, Samples, open_samples, write_shard
from data.sample_summary import summarise, summary_lines
from data.signals import Signals
from evaluation.sample_page import entropy_summary, plot_lengths, sample_page

HIDDEN, VOCAB = 8, 40
HEAD = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1))


class Letters:
    """A tokenizer whose end-of-sequence token is a piece of HTML."""

    def decode(self, ids: list[int]) -> str:
        return "<b>" if ids == [2] else "x"


def make(folder: Path, *, signals: bool = True) -> Samples:
    """60 answers of 1 to 9 tokens; every third is cut, every fourth of another task."""
    generator = torch.Generator().manual_seed(0)
    records, kept = [], []
    for number in range(60):
        length = 9 if number % 3 == 0 else 1 + number % 8
        states = torch.randn(length, HIDDEN, generator=generator)
        logits = states @ HEAD.T
        kept.append(Signals(states, logits.logsumexp(-1), logits.argmax(-1)))
        records.append(
            SampleRecord(
                prompt_id=f"p{number}",
                task="json" if number % 4 else "sql",
                template="t",
                split="test" if number % 5 == 0 else "train",
                seen_template=True,
                sample_index=0,
                temperature=0.0,
                seed=number,
                input_ids=[1, 5, *[7] * (length - 1), 7 if number % 3 == 0 else 2],
                completion_mask=[False, False, *[True] * length],
                finish_reason="length" if number % 3 == 0 else "stop",
            )
        )
    folder.mkdir()
    write_shard(folder, 0, records, kept if signals else None)
    return open_samples(folder)


def test_the_entropy_is_that_of_the_definition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = make(tmp_path / "s")
    monkeypatch.setattr("evaluation.sample_page.ENTROPY_SAMPLES", 60)
    found = entropy_summary(samples, HEAD, 0.7)
    states = torch.cat([samples.signals(index).tensors()["hidden"] for index in range(60)]).double()
    probs = (states @ HEAD.T.double() / 0.7).softmax(-1)
    values = -(probs * probs.log()).sum(-1)
    assert found["tokens"] == len(values)
    assert found["mean"] == pytest.approx(float(values.mean()), abs=1e-3)
    assert found["p95"] == pytest.approx(float(values.quantile(0.95)), abs=1e-3)
    assert math.isclose(sum(found["shares"].values()), 1, abs_tol=1e-3)
    assert found["shares"]["2"] == pytest.approx(float((values >= 2).double().mean()), abs=1e-4)
    monkeypatch.undo()
    assert 0 < entropy_summary(samples, HEAD, 0.7)["tokens"] < found["tokens"]


def test_the_lengths_add_up_and_cut_answers_stand_apart(tmp_path: Path) -> None:
    plot = plot_lengths(make(tmp_path / "s"))
    assert plot.heading[1:] == ("end by themselves", "cut at max_new_tokens")
    assert [sum(row[column] for row in plot.rows) for column in (1, 2)] == [40, 20]
    longest = plot.rows[-1]
    assert longest[1:] == (0, 20), "only those that were cut are of the greatest length"


def test_the_page_holds_everything_and_is_the_same_again(tmp_path: Path) -> None:
    samples = make(tmp_path / "s")
    summary = summarise(tmp_path / "s")
    summary["entropy"] = entropy_summary(samples, HEAD, 1.0)
    page = sample_page(samples, json.loads(json.dumps(summary)), "a <recipe>", Letters())  # type: ignore[arg-type]
    assert "a &lt;recipe&gt;" in page and "&lt;b&gt;" in page and "<b>" not in page
    assert not re.search(r"<script|src=|href=\"http|@import", page)
    assert page.count("<svg") == 2 and "33.3%" in page
    for task in ("json", "sql"):
        count = summary["by_task"][task]["samples"]
        assert re.search(rf'<td class="word">{task}</td><td>{count}</td>', page)
    assert sum(each["samples"] for each in summary["by_task"].values()) == summary["all"]["samples"] == 60
    again = sample_page(samples, summary, "a <recipe>", Letters())  # type: ignore[arg-type]
    assert page == again
    assert any(line.startswith("entropy") for line in summary_lines(summary))


def test_without_hidden_states_the_entropy_is_said_to_be_unknown(tmp_path: Path) -> None:
    samples = make(tmp_path / "s", signals=False)
    summary = summarise(tmp_path / "s")
    page = sample_page(samples, summary, "r", Letters())  # type: ignore[arg-type]
    assert "no hidden states were kept" in page and page.count("<svg") == 1
    assert not any(line.startswith("entropy") for line in summary_lines(summary))
