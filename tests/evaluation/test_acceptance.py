"""Acceptance against brute force: simulate what a server does with each draft token, id by id."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from data.records import Batch, SampleRecord, Samples, collate
from data.signals import Signals
from evaluation.acceptance import AcceptanceTable, bootstrap_ratio, summarise, teacher_forced
from evaluation.decoder.drafters import DraftModel
from evaluation.signals import target_signals

VOCAB, EOS = 48, 2
REDUCED = torch.tensor([2, 3, 5, 8, 13, 21, 34, 40, 41, 42])


def llama(seed: int, layers: int = 2, head: int = VOCAB) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.3,
        pad_token_id=EOS,
        eos_token_id=EOS,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).double().eval()
        model.lm_head = torch.nn.Linear(16, head, bias=False, dtype=torch.float64)
        torch.nn.init.normal_(model.lm_head.weight)
    return model


def record(index: int, prompt: int, completion: int, **fields: object) -> SampleRecord:
    generator = np.random.default_rng(index)
    ids = [*generator.integers(3, VOCAB, prompt + completion - 1).tolist(), EOS]
    values: dict[str, object] = {
        "prompt_id": f"p{index}",
        "task": "json",
        "template": "t",
        "split": "test",
        "seen_template": True,
        "sample_index": 0,
        "temperature": 0.0,
        "seed": 0,
        "input_ids": ids,
        "completion_mask": [False] * prompt + [True] * completion,
        "finish_reason": "stop",
    }
    return SampleRecord(**{**values, **fields})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return llama(0)


@pytest.fixture(scope="module")
def with_signals(target: LlamaForCausalLM) -> Callable[..., Samples]:
    def add(records: list[SampleRecord], temperature: float = 1.0) -> Samples:
        signals = [
            target_signals(target, collate(Samples([one], None), [0], EOS), temperature) for one in records
        ]
        return Samples(records, [(one, 0) for one in signals])

    return add


@pytest.mark.parametrize("vocab", [None, REDUCED])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_against_brute_force(
    target: LlamaForCausalLM,
    with_signals: Callable[..., Samples],
    vocab: torch.Tensor | None,
    temperature: float,
) -> None:
    records = [record(0, 3, 4), record(1, 6, 2), record(2, 2, 7)]
    samples = with_signals(records, temperature)
    drafter = DraftModel(llama(9, layers=1, head=VOCAB if vocab is None else len(vocab)), vocab)
    table = teacher_forced(drafter, target.lm_head.weight, samples, temperature=temperature, batch_size=2)
    covered = list(range(VOCAB)) if vocab is None else vocab.tolist()
    for index, one in enumerate(records):
        expected: list[tuple[float, float, float]] = []
        for position in range(len(one.input_ids)):
            if not one.completion_mask[position]:
                continue
            # no padding, no shift, no batch: the prefix alone decides the next token
            prefix = torch.tensor([one.input_ids[:position]])
            target_logits = target(prefix).logits[0, -1]
            target_probs = (target_logits / temperature).softmax(-1)
            draft_logits = drafter.model.lm_head(drafter.model.model(prefix).last_hidden_state[0, -1])
            draft_probs = (draft_logits / temperature).softmax(-1)
            accepted = sum(
                draft_probs[row].item() * min(1.0, (target_probs[token] / draft_probs[row]).item())
                for row, token in enumerate(covered)
            )
            chosen = covered[int(draft_logits.argmax())]
            expected.append(
                (accepted, target_probs[chosen].item(), float(chosen == int(target_logits.argmax())))
            )
        mine = table.sample == index
        found = torch.stack([table.sampled[mine], table.argmax[mine], table.greedy[mine]], dim=1)
        torch.testing.assert_close(found, torch.tensor(expected), atol=1e-6, rtol=1e-5)


def test_the_target_as_its_own_drafter_accepts_everything(
    target: LlamaForCausalLM, with_signals: Callable[..., Samples]
) -> None:
    samples = with_signals([record(0, 3, 4), record(1, 6, 2)])
    table = teacher_forced(
        DraftModel(target, None), target.lm_head.weight, samples, temperature=1.0, batch_size=8
    )
    assert table.means()["sampled"] == pytest.approx(1, abs=1e-6)
    assert table.means()["greedy"] == 1
    assert table.means()["argmax"] < 1


def test_computed_signals_equal_cached_ones(
    target: LlamaForCausalLM, with_signals: Callable[..., Samples]
) -> None:
    samples = with_signals([record(0, 3, 4), record(1, 6, 2)])
    bare = Samples(samples.records, None)
    drafter = DraftModel(llama(9), None)

    def compute(batch: Batch) -> Signals:
        return target_signals(target, batch, 1.0)

    cached = teacher_forced(drafter, target.lm_head.weight, samples, temperature=1.0, batch_size=2)
    live = teacher_forced(
        drafter, target.lm_head.weight, bare, temperature=1.0, batch_size=2, signals=compute
    )
    torch.testing.assert_close(live.sampled, cached.sampled)
    assert torch.equal(live.greedy, cached.greedy)
    with pytest.raises(ValueError, match="no target signals"):
        teacher_forced(drafter, target.lm_head.weight, bare, temperature=1.0, batch_size=2)


def test_the_drafter_keeps_its_mode(target: LlamaForCausalLM, with_signals: Callable[..., Samples]) -> None:
    drafter = DraftModel(llama(9).train(), None)
    teacher_forced(
        drafter, target.lm_head.weight, with_signals([record(0, 3, 4)]), temperature=1.0, batch_size=1
    )
    assert drafter.model.training


def table_of(values: list[float], sample: list[int]) -> AcceptanceTable:
    column = torch.tensor(values)
    return AcceptanceTable(column, column / 2, column.round(), torch.tensor(sample))


def test_summary_groups_and_weights_by_token() -> None:
    records = [
        record(0, 1, 3, task="json", temperature=0.0),
        record(1, 1, 1, task="sql", temperature=0.0),
        record(2, 1, 2, task="json", temperature=1.0),
        record(3, 1, 2, task="json", temperature=0.0, seen_template=False),
    ]
    table = table_of([1, 1, 0, 0, 0.5, 0.5, 1, 0], [0, 0, 0, 1, 2, 2, 3, 3])
    rows = summarise(table, records, seed=0)
    assert [(row["split"], row["temperature"], row["task"]) for row in rows] == [
        ("seen", 0.0, "all"),
        ("seen", 0.0, "json"),
        ("seen", 0.0, "sql"),
        ("seen", 1.0, "all"),
        ("seen", 1.0, "json"),
        ("unseen", 0.0, "all"),
        ("unseen", 0.0, "json"),
    ]
    first = rows[0]
    assert (first["tokens"], first["samples"]) == (4, 2)
    assert first["sampled"]["mean"] == pytest.approx(0.5)  # tokens, not samples: that would be 1/3
    assert first["argmax"]["mean"] == pytest.approx(0.25)
    assert first["sampled"]["low"] < 0.5 < first["sampled"]["high"]
    assert rows[2]["sampled"] == {"mean": 0.0, "low": 0.0, "high": 0.0}
    assert summarise(table, records, seed=0) == rows


def test_answers_to_one_prompt_count_as_one_in_the_interval() -> None:
    def interval(copies: int) -> dict[str, float]:
        records = [
            record(10 * prompt + copy, 1, 4, task="json", prompt_id=f"p{prompt}")
            for prompt in range(6)
            for copy in range(copies)
        ]
        values = [float(sample // copies > place) for sample in range(len(records)) for place in range(4)]
        owners = [number for number in range(len(records)) for _ in range(4)]
        (row, _) = summarise(table_of(values, owners), records, seed=0)
        assert row["samples"] == len(records)
        return row["sampled"]

    assert interval(8) == interval(1)  # by sample it would be far narrower


def test_bootstrap_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    hits = 0
    for seed in range(60):
        counts = generator.integers(5, 20, size=40).astype(float)
        rates = generator.beta(8, 2, size=40)  # samples differ: their tokens are not independent
        interval = bootstrap_ratio(
            generator.binomial(counts.astype(int), rates).astype(float), counts, seed=seed
        )
        hits += interval["low"] <= 0.8 <= interval["high"]
    assert 50 <= hits <= 60


def test_bootstrap_narrows_with_more_samples() -> None:
    generator = np.random.default_rng(1)
    totals, counts = generator.random(400) * 10, np.full(400, 10.0)
    few, many = (bootstrap_ratio(totals[:size], counts[:size], seed=0) for size in (20, 400))
    assert many["high"] - many["low"] < (few["high"] - few["low"]) / 2
