"""The bench of the decoder: every contender makes the same tokens, and ratios are paired."""

import math

import pytest
import torch
from transformers import LlamaForCausalLM

from distill.bench import decoder as bench_decoder
from distill.bench.command import report
from distill.bench.decoder import Bench, Record, batched, single, take_turns
from evaluation.decoder.drafters import DraftModel
from evaluation.decoder.engine import Request
from tests.distill.conftest import VOCAB, tiny_llama


@pytest.fixture(scope="module")
def bench() -> Bench:
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, VOCAB, (5 + row % 3,), generator=generator).tolist() for row in range(4)]
    draft: LlamaForCausalLM = tiny_llama(0, tied=False)  # the target's own weights: many drafts are accepted
    return Bench(tiny_llama(0), DraftModel(draft), tiny_llama(0), prompts, 6, 3, 1)


def said(text: str) -> None:
    assert text


def test_every_contender_makes_the_same_tokens(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    found = single(bench, said)
    count = len(bench.prompts)
    assert found["answers_equal_to_plain"] == dict.fromkeys(found["answers_equal_to_plain"], count)
    assert len(found["answers_equal_to_plain"]) == 6
    assert 1 <= found["tokens_per_target_call"] <= 1 + bench.num_speculative_tokens
    for name, value in found.items():
        if "_vs_" in name:
            assert 0 < value["low"] <= value["mean"] <= value["high"], name
    assert math.isclose(
        found["measured_over_predicted_speedup"],
        found["speculative_vs_plain"]["mean"] / found["predicted_speedup"],
    )


def test_batches_are_whole(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_decoder, "BATCH", 3)
    found = batched(bench, said)
    assert set(found["tokens_per_second"]) == {"plain", "speculative", "transformers"}
    assert [len(group) for group in bench.groups(3)] == [3]  # of four prompts


def test_turns_rotate_and_are_paired() -> None:
    order: list[str] = []

    def contender(name: str) -> bench_decoder.Contender:
        def decode(group: list[Request], record: Record) -> list[list[int]]:
            order.append(name)
            return [[1] for _ in group]

        return decode  # type: ignore[return-value]

    groups = [[Request([number], 1)] for number in (3, 4)]
    records = take_turns({"a": contender("a"), "b": contender("b")}, groups, said)
    assert order == ["a", "b", "a", "b", "b", "a"]  # a warm-up, then each group with another first
    assert {len(record.seconds) for record in records.values()} == {2}


def test_the_report_names_every_comparison() -> None:
    interval = {"mean": 1.5, "low": 1.25, "high": 1.75}
    found = {
        "recipe": "r",
        "prompts": 2,
        "new_tokens": 4,
        "num_speculative_tokens": 3,
        "environment": {"cpu": "a processor", "commit": "abc"},
        "single": {"plain_vs_transformers_generate": interval, "round_overhead": 0.0321},
        "batched": {"tokens_per_second": {"plain": 20.0}},
        "llama_cpp": {"missing": "install it"},
    }
    text = report(found)
    assert "plain_vs_transformers_generate: 1.50 [1.25, 1.75]" in text
    assert "round_overhead: 0.0321" in text and "plain 20" in text and "missing: install it" in text
