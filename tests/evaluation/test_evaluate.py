"""The evaluation stage on tiny models: what it writes, that it resumes, and that its verdicts follow the
numbers.
"""

import json
from pathlib import Path

import pytest
import torch

from data.records import Samples, open_samples, write_shard
from evaluation.contestants import contestants
from evaluation.decoder.drafters import DraftModel
from evaluation.decoder.runner import Runner
from evaluation.decoder.sampler import BuiltinSampler
from evaluation.evaluate import (
    EvaluateConfig,
    ServingConfig,
    best_row,
    run,
    summarise_speed,
)
from evaluation.measurements import Evaluation
from tests.data.test_records import record
from tests.evaluation.decoder.tiny_models import llama, prompts, relative

CONFIG = EvaluateConfig(prompts=3, num_speculative_tokens=[2, 3], max_new_tokens=10)


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Samples:
    """Test samples of a tiny target on seen and unseen templates, at temperatures 0 and 1."""
    from data.engines import SampleRequest

    directory = tmp_path_factory.mktemp("samples")
    engine = BuiltinSampler(llama(0), eos_ids=[7], batch_size=4, max_length=64, signal_temperature=1.0)
    records, signals = [], []
    for temperature in (0.0, 1.0):
        wanted = [SampleRequest(prompt, seed) for seed, prompt in enumerate(prompts(8))]
        done = engine.sample(wanted, temperature=temperature, max_new_tokens=12, on_tokens=lambda count: None)
        for number, (request, completion) in enumerate(zip(wanted, done, strict=True)):
            ids = [*request.prompt, *completion.tokens]
            changes = {
                "prompt_id": str(number),
                "split": "test",
                "temperature": temperature,
                "seen_template": number < 4,
            }
            records.append(record(ids, len(request.prompt), **changes))
            signals.append(completion.signals)
    write_shard(directory, 0, records, signals)
    return open_samples(directory)


def evaluation(samples: Samples, drafter: DraftModel, **serving: object) -> Evaluation:
    return Evaluation(llama(0), [7], drafter, samples, CONFIG, ServingConfig(**serving), seed=0)


def measure(plan: Evaluation, directory: Path) -> dict:
    before = DraftModel(llama(9))
    return run(plan, before, machine={}, data_digest="d", directory=directory, on_group=lambda: None)


def test_the_target_as_its_own_drafter_is_perfect_by_every_measure(
    samples: Samples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evaluation.decoder.linear.int8_works", lambda: False)  # rounding would cost a few
    result = measure(evaluation(samples, DraftModel(llama(0))), tmp_path)
    for row in result["acceptance"]:
        assert row["greedy"]["mean"] == 1.0
        assert row["sampled"]["mean"] == pytest.approx(1.0, abs=1e-3)
    assert all(row["greedy"]["mean"] < 0.9 for row in result["acceptance_before"])
    own = [row for row in result["decode"] if row["drafter"] == "model"]
    assert {(row["split"], row["num_speculative_tokens"]) for row in own} == {
        (split, count) for split in ("seen", "unseen") for count in (2, 3)
    }
    for row in own:
        assert row["acceptance_rate"] == 1.0
        assert row["identical_outputs"] == 3 and row["bugs"] == 0 and not row["excess_bug"]
    assert result["certificate"]["holds"] and result["certificate"]["greedy"]["outputs"] == 2 * 3 * 3
    assert json.loads((tmp_path / "evaluation.json").read_text()) == result


def test_another_drafter_is_lossless_but_not_accepted(samples: Samples, tmp_path: Path) -> None:
    vocab = torch.arange(0, 48, 2)
    model = llama(9)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight[vocab].detach())
    result = measure(evaluation(samples, DraftModel(model, vocab)), tmp_path)
    for row in result["decode"]:
        assert row["identical_outputs"] + row["near_ties"] == 3 and row["bugs"] == 0
        assert row["acceptance_rate"] < 1
    replay = result["replay"]  # rounds replay exactly from teacher-forced matches
    assert replay["prompts"] == replay["same_rounds"] == 3 and not replay["bug"]
    assert replay["accepted"] == replay["replayed"]


def test_a_serving_mode_that_samples_promises_no_identity(samples: Samples, tmp_path: Path) -> None:
    result = measure(evaluation(samples, DraftModel(llama(9)), temperature=1.0, batch_size=2), tmp_path)
    assert all(row["identical_outputs"] is None and not row["excess_bug"] for row in result["decode"])
    assert result["certificate"]["holds"] and result["certificate"]["greedy"]["outputs"] == 4
    assert result["plain"]["transformers_static"] is None and result["replay"] is None
    sampled = [row for row in result["decode"] if row["drafter"] == "model"]
    assert all({"block", "token"} <= set(row["expected_accepted"]) for row in sampled)


def test_measures_that_are_on_disk_are_not_taken_again(samples: Samples, tmp_path: Path) -> None:
    plan = evaluation(samples, DraftModel(llama(9)))
    first = measure(plan, tmp_path)
    (tmp_path / "evaluation.json").unlink()
    (tmp_path / "decode-unseen.json").unlink()
    again = measure(plan, tmp_path)
    assert again["acceptance"] == first["acceptance"] and again["cost"] == first["cost"]
    seen = [row for row in again["decode"] if row["split"] == "seen"]
    assert seen == [row for row in first["decode"] if row["split"] == "seen"]  # times included


def test_sampled_signals_are_the_targets_own(samples: Samples) -> None:
    target = llama(0)
    for index in range(4):
        item, told = samples[index], samples.signals(index)
        first = item.completion_mask.index(True)
        with torch.inference_mode():
            logits = target(torch.tensor([item.input_ids])).logits[0, first - 1 : -1]
        assert torch.allclose(told.hidden @ target.lm_head.weight.T, logits, atol=2e-4)
        assert torch.allclose(told.logsumexp, logits.logsumexp(-1), atol=2e-4)
        assert torch.equal(told.argmax, logits.argmax(-1))


def row(count: int, mean: float, split: str = "seen", drafter: str = "model") -> dict:
    interval = {"mean": mean, "low": mean - 0.1, "high": mean + 0.1}
    return {
        "drafter": drafter, "split": split, "num_speculative_tokens": count, "speedup": interval,
        "tokens_per_target_call": {"mean": 4.0}, "rounds_by_steps": [0] * count + [9], "columns_beside": 0,
        "conditional_acceptance": [0.8] * count, "rounds_per_text": 5.0, "plain_tokens_per_second": 10.0,
    }  # fmt: skip


COSTS = {
    "target_step_ms": 10.0, "draft_step_ms": 1.0, "first_draft_step_ms": 1.0, "cost_ratio": 0.1,
    "verify_overhead": {str(count): 0.1 * count for count in range(1, 9)},
    "batch_size": 1, "draft_reading_ms": 2.0,
}  # fmt: skip
FORETOLD = {count: {"tokens_per_target_call": 1 + 0.5 * count, "rounds_per_text": 10.0} for count in range(9)}


def summary(rows: list[dict], theirs: float | None) -> dict:
    decoded = {"seen": {"plain": {"tokens_per_second": 10.0}, "rows": rows}}
    return summarise_speed(decoded, COSTS, [COSTS], FORETOLD, theirs)


def test_speedup_is_over_the_fastest_plain_path() -> None:
    rows = [row(4, 2.0), row(4, 2.0, drafter="adaptive")]
    slower = summary(rows, 5.0)
    assert slower["decode"][0]["speedup"]["mean"] == 2.0 and slower["plain"]["fastest"] == "ours"
    faster = summary(rows, 20.0)
    shown = [found["decode"][0]["plain_tokens_per_second"] for found in (slower, faster)]
    assert shown == [10.0, 20.0]
    assert (
        faster["decode"][0]["speedup"]["mean"] == 1.0 and faster["plain"]["fastest"] == "transformers_static"
    )
    assert faster["decode"][0]["predicted_speedup"] == pytest.approx(
        slower["decode"][0]["predicted_speedup"] / 2
    )


def test_the_best_row_is_the_drafters_fastest_on_seen_templates() -> None:
    rows = [row(4, 1.5), row(8, 1.7), row(4, 3.0, split="unseen"), row(4, 9.0, drafter="ngram")]
    assert best_row(rows, "model") == rows[1]
    assert best_row([rows[2], rows[3]], "model") == rows[2]


def test_the_headline_is_decided_beforehand_and_the_best_fixed_k_named_beside_it() -> None:
    rows = [row(4, 1.9), row(8, 1.2), row(8, 1.8, drafter="adaptive")]
    best = summary(rows, None)["best"]
    assert (best["drafter"], best["num_speculative_tokens"]) == ("adaptive", 8)
    assert best["fixed_num_speculative_tokens"] == 4


@pytest.mark.parametrize("counts", [[], [0], [4, 4]])
def test_impossible_numbers_of_drafts_are_refused(counts: list[int]) -> None:
    with pytest.raises(ValueError, match="num_speculative_tokens"):
        EvaluateConfig(num_speculative_tokens=counts)


def test_runner_room_covers_prompt_answer_and_drafts(samples: Samples) -> None:
    plan = evaluation(samples, DraftModel(llama(9)))
    longest = max(len(request.prompt) for request in plan.prompts("seen").values())
    assert isinstance(plan.runner, Runner) and plan.runner.length >= longest + 10 + 3


def test_a_tree_races_where_it_is_asked_for_and_may_pay(
    samples: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EvaluateConfig(prompts=4, num_speculative_tokens=[3], max_new_tokens=10, tree=True)
    plan = Evaluation(llama(0), [7], DraftModel(relative(llama(0))), samples, config, ServingConfig(), seed=0)
    costs = {
        "batch_size": 1, "target_step_ms": 10.0, "draft_step_ms": 1.0, "first_draft_step_ms": 1.0,
        "cost_ratio": 0.1, "verify_overhead": {"1": 0.02, "2": 0.05, "3": 0.1, "6": 0.15},
    }  # fmt: skip
    rows = plan.decode("seen", costs, [3], lambda: None)["rows"]
    assert [row["drafter"] for row in rows] == ["model", "adaptive", "tree", "ngram"]
    chain, tree = rows[1:3]
    assert tree["siblings"] > 0 == chain["siblings"]
    assert tree["identical_outputs"] == tree["prompts"] == 4
    assert tree["tokens_per_target_call"]["mean"] > chain["tokens_per_target_call"]["mean"]
    dear = {**costs, "verify_overhead": {"1": 0.5, "2": 1.0, "3": 1.5}}
    assert "tree 3" not in contestants(plan, dear, [3])


def test_other_batch_sizes_are_measured_on_the_headline_split(
    samples: Samples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evaluation.decoder.linear.int8_works", lambda: False)  # else matches are only alike
    config = EvaluateConfig(prompts=3, num_speculative_tokens=[2], max_new_tokens=6, batch_sizes=[1, 2])
    plan = Evaluation(llama(0), [7], DraftModel(llama(9)), samples, config, ServingConfig(), seed=0)
    heard: list[int] = []
    result = run(
        plan,
        DraftModel(llama(9)),
        machine={},
        data_digest="d",
        directory=tmp_path,
        on_group=lambda: heard.append(1),
    )
    assert plan.batches() == len(heard) == 3 + 3 + 1  # 1 is the serving batch size: measured already
    assert {(row["split"], row["batch_size"], row["drafter"]) for row in result["batches"]} == {
        ("seen", 2, "model")
    }
    assert all(row["bugs"] == 0 and row["predicted_speedup"] > 0 for row in result["batches"])
    by_k = {
        row["num_speculative_tokens"]: row["tokens_per_target_call"] for row in result["cost_model"]["table"]
    }
    fixed = next(row for row in result["decode"] if row["drafter"] == "model" and row["split"] == "seen")
    assert by_k[0] == 1.0 and by_k[2] == pytest.approx(fixed["tokens_per_target_call"]["mean"])
    assert {costs["batch_size"] for costs in result["cost_model"]["costs"]} == {1, 2, 4, 16}
    assert {row["by"] for row in result["acceptance_curves"]} == {"block", "answer", "entropy"}
