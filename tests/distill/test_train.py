"""Training runs on tiny models: plan, masks, equalities between ways of running, resume, and a golden
trajectory."""

import importlib.util
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from transformers import LlamaForCausalLM, PreTrainedModel

from data.errors import UserError
from data.records import Samples, collate, pack
from data.signals import Signals
from distill.chunked import TargetRows, chunked_loss
from distill.drafter import prune
from distill.loss_config import LossConfig
from distill.models import Target, load_drafter
from distill.train import (
    BatchPlan,
    TrainConfig,
    best_check,
    check_steps,
    held_out_samples,
    plan_batches,
    train_drafter,
)
from evaluation.decoder.drafters import DraftModel
from evaluation.signals import completion_states, in_half, target_signals, top_k_of

VOCAB = torch.arange(0, 96, 2)
GOLDEN = Path(__file__).parents[1] / "golden"
SIZES = [(length, 1 + length // 3) for length in (5, 9, 30, 7, 12, 31, 8, 6, 29, 11)]


def ignore(step: int, steps: int, tokens: int, measures: dict[str, float]) -> None:
    pass


@pytest.fixture
def drafter(target: Target) -> DraftModel:
    return new_drafter(target)


def new_drafter(target: Target) -> DraftModel:
    return DraftModel(prune(target.model, [0, 3], target.model.lm_head.weight[VOCAB]), VOCAB)


def train(
    drafter: DraftModel, target: Target, samples: Samples, out_dir: Path, **fields: Any
) -> dict[str, torch.Tensor]:
    """Run with few settings; returns the weights after the last step (not the best ones)."""
    report = fields.pop("report", ignore)
    config = TrainConfig(**{"tokens": 300, "learning_rate": 3e-3, "batch_size": 4, **fields})
    train_drafter(drafter, target, samples, config, temperature=1.0, seed=0, out_dir=out_dir, report=report)
    return {name: value.clone() for name, value in drafter.model.state_dict().items()}


# --- the plan ---


def test_plan_meets_the_budget_and_repeats() -> None:
    plan = plan_batches(SIZES, batch_size=3, tokens=120, accumulation=1, seed=1)
    assert sum(plan.tokens) >= 120 > sum(plan.tokens[:-1])
    assert plan.tokens == [sum(SIZES[index][1] for index in batch) for batch in plan.batches]
    assert plan == plan_batches(SIZES, batch_size=3, tokens=120, accumulation=1, seed=1)
    assert plan != plan_batches(SIZES, batch_size=3, tokens=120, accumulation=1, seed=2)
    per_epoch = -(-len(SIZES) // 3)
    assert sorted(index for batch in plan.batches[:per_epoch] for index in batch) == list(
        range(len(SIZES))
    )  # each once before any twice


def test_plan_is_whole_steps() -> None:
    plan = plan_batches(SIZES, batch_size=2, tokens=100, accumulation=3, seed=0)
    assert len(plan.batches) % 3 == 0 and plan.steps == len(plan.batches) // 3
    assert plan.tokens_after(0) == 0 and plan.tokens_after(plan.steps) == sum(plan.tokens)
    assert plan.tokens_after(1) == sum(plan.tokens[:3])


def test_processes_share_each_batch() -> None:
    plan = BatchPlan([[5, 6, 7, 8], [9]], [10, 2], 1)
    assert plan.shares(1) == plan.batches
    assert plan.shares(2) == [[5, 7], [6, 8], [9], []]  # process 0 takes every second row, from 0 on


def test_plan_keeps_like_lengths_together() -> None:
    plan = plan_batches(SIZES * 20, batch_size=10, tokens=700, accumulation=1, seed=0)
    sizes = SIZES * 20

    def padding(batches: list[list[int]]) -> int:
        return sum(
            max(sizes[i][0] for i in batch) * len(batch) - sum(sizes[i][0] for i in batch)
            for batch in batches
        )

    in_order = [list(range(first, first + 10)) for first in range(0, 200, 10)]
    assert padding(plan.batches) < 0.3 * padding(in_order[: len(plan.batches)])


def test_checks_are_spread_and_include_the_last_step() -> None:
    assert check_steps(60) == [10, 20, 30, 40, 50, 60]
    assert check_steps(2) == [1, 2] and check_steps(1) == [1]


def test_the_best_check() -> None:
    def check(step: int, greedy: float, sampled: float) -> dict[str, float]:
        return {"step": step, "greedy": greedy, "sampled": sampled, "argmax": 0}

    assert best_check([check(0, 0.1, 0.9), check(1, 0.3, 0.2), check(2, 0.3, 0.2)], "greedy")["step"] == 1
    assert best_check([check(0, 0.1, 0.9), check(1, 0.3, 0.2), check(2, 0.3, 0.4)], "greedy")["step"] == 2
    assert best_check([check(0, 0.1, 0.9), check(1, 0.3, 0.2)], "sampled")["step"] == 0


def test_held_out_samples_follow_the_metric(make_samples: Callable[..., Samples]) -> None:
    samples = make_samples(40)
    for record in samples.records[::10]:
        record.temperature = 1.0
    greedy, sampled = (held_out_samples(samples, metric, 1.0, 10**6) for metric in ("greedy", "sampled"))  # type: ignore[arg-type]
    assert {record.temperature for record in greedy} == {0.0} and {
        record.temperature for record in sampled
    } == {1.0}
    assert {record.split for record in (*greedy, *sampled)} == {"select"}
    few = held_out_samples(samples, "greedy", 1.0, greedy.completion_tokens // 2)
    assert 0 < len(few) < len(greedy)
    assert len(held_out_samples(samples, "argmax", 0.3, 10**6)) == len(
        samples.where(split="select")
    )  # none drawn so
    with pytest.raises(UserError, match="select split"):
        held_out_samples(samples.where(split="train"), "greedy", 1.0, 100)


def test_configs_refuse_what_they_do_not_know() -> None:
    with pytest.raises(ValidationError, match="lk_hybird"):
        LossConfig.model_validate({"name": "lk_hybird"})
    with pytest.raises(ValidationError, match="greater than 0"):
        TrainConfig.model_validate({"tokens": 0})


# --- which positions are trained ---


def test_the_first_answer_token_and_eos_are_trained_where_pad_is_eos(
    target: Target, make_samples: Callable[..., Samples]
) -> None:
    """Move one target probability at a time: the loss must feel each completion token and nothing else."""
    samples = make_samples(8)
    assert target.pad_id in target.eos_ids
    batch = collate(samples, [0, 1, 2], target.pad_id)
    assert batch.signals is not None
    lengths = [len(samples[index].input_ids) for index in (0, 1, 2)]
    assert len(set(lengths)) > 1 and samples[0].input_ids[-1] == target.pad_id  # padding beside a trained EOS
    states = completion_states(target.model, batch.input_ids, batch.completion_mask)
    assert len(states) == len(batch.signals) == sum(samples[index].completion_tokens for index in (0, 1, 2))
    row = 0
    for index in range(3):
        record = samples[index]
        first = record.completion_mask.index(True)
        alone = target.model.model(torch.tensor([record.input_ids])).last_hidden_state[0]
        # the state at the prompt's last token predicts the first answer token, the one before the end
        # predicts EOS
        torch.testing.assert_close(states[row], alone[first - 1])
        row += record.completion_tokens
        torch.testing.assert_close(states[row - 1], alone[len(record.input_ids) - 2])
        torch.testing.assert_close(batch.signals.hidden[row - 1], alone[len(record.input_ids) - 2])


def test_training_teaches_the_first_answer_token_and_eos(
    target: Target, make_samples: Callable[..., Samples], tmp_path: Path
) -> None:
    """One sample learnt by heart with cross-entropy: each completion token is predicted, the prompt's are
    not."""
    samples = make_samples(6)
    one = Samples(
        [samples.records[2], samples.records[0]],
        [samples.locations[2], samples.locations[0]],  # type: ignore[index]
    )
    drafter = DraftModel(prune(target.model, [0, 3], target.model.lm_head.weight), None)
    train(
        drafter,
        target,
        one,
        tmp_path,
        tokens=60 * one[0].completion_tokens,
        loss={"name": "cross_entropy"},
        learning_rate=1e-2,
    )
    record = one[0]
    assert record.split == "train" and record.input_ids[-1] == target.pad_id
    ids = torch.tensor([record.input_ids])
    predicted = drafter.model(ids).logits[0, :-1].argmax(-1)
    right = predicted == ids[0, 1:]
    trained = torch.tensor(record.completion_mask[1:])
    assert right[trained].all()
    assert not right[~trained].any()


# --- equal ways to run ---


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float) -> None:
    assert list(ours) == list(theirs)
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize("full", [False, True])
def test_live_equals_hidden(
    full: bool, target: Target, make_samples: Callable[..., Samples], tmp_path: Path
) -> None:
    samples = make_samples(24)
    losses: dict[str, list[float]] = {"hidden": [], "live": []}
    weights = {}
    for signal, seen in losses.items():

        def report(
            step: int, steps: int, tokens: int, measures: dict[str, float], seen: list[float] = seen
        ) -> None:
            seen.append(measures.get("loss", 0.0))

        with_them = samples if signal == "hidden" else Samples(samples.records, None)
        head = target.model.lm_head.weight
        drafter = DraftModel(prune(target.model, [0, 3], head), None) if full else new_drafter(target)
        weights[signal] = train(
            drafter,
            target,
            with_them,
            tmp_path / signal,
            signal=signal,
            report=report,
            tokens=250,
        )
    assert len(losses["hidden"]) > 5 and losses["hidden"][-1] > 0
    assert losses["live"] == pytest.approx(losses["hidden"], rel=1e-4)
    assert_close(weights["live"], weights["hidden"], 1e-4)


def test_four_accumulated_batches_equal_one_of_four(
    target: Target, make_samples: Callable[..., Samples], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of 1 x 4 and 4 x 1, of unequal lengths: the loss is divided by all completion tokens of the
    step."""
    import distill.train

    samples = make_samples(20)
    sizes = [(len(record.input_ids), record.completion_tokens) for record in samples.where(split="train")]
    whole = plan_batches(sizes, batch_size=4, tokens=200, accumulation=1, seed=0)
    assert all(len(batch) == 4 for batch in whole.batches)
    assert any(len({sizes[index][1] for index in batch}) > 1 for batch in whole.batches)
    weights = {}
    for accumulation in (1, 4):
        batches = (
            whole.batches if accumulation == 1 else [[index] for batch in whole.batches for index in batch]
        )
        tokens = [sum(sizes[index][1] for index in batch) for batch in batches]
        plan = distill.train.BatchPlan(batches, tokens, accumulation)
        monkeypatch.setattr(distill.train, "plan_batches", lambda *_, plan=plan, **__: plan)
        weights[accumulation] = train(
            new_drafter(target), target, samples, tmp_path / str(accumulation), accumulation=accumulation
        )
    assert_close(weights[4], weights[1], 2e-5)


def test_gradients_are_those_of_the_eager_sum_over_count(
    target: Target, make_samples: Callable[..., Samples], tmp_path: Path
) -> None:
    """One step of the trainer, its gradient caught before the optimizer, against the loss written out."""
    from distill import trainer as trainer_module
    from distill import training_arguments

    samples = make_samples(12)
    caught: dict[str, torch.Tensor] = {}

    class Catch(trainer_module.TrainerCallback):
        def on_pre_optimizer_step(
            self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
        ) -> None:
            if not caught:
                caught.update({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})

    drafter = new_drafter(target)
    original = training_arguments._CLIP
    training_arguments._CLIP = 1e9
    try:
        run_with_callback(drafter, target, samples, tmp_path, Catch())
    finally:
        training_arguments._CLIP = original
    fresh = new_drafter(target)
    own = samples.where(split="train")
    sizes = [(len(record.input_ids), record.completion_tokens) for record in own]
    first = plan_batches(sizes, batch_size=4, tokens=300, accumulation=1, seed=0).batches[0]
    batch = collate(own, first, target.pad_id)
    told = target_signals(target.model, batch, 1.0)
    states = completion_states(fresh.model, batch.input_ids, batch.completion_mask)
    rows = TargetRows(told.hidden, target.model.lm_head.weight[VOCAB], told.logsumexp)
    loss = chunked_loss("forward_kl", states, fresh.model.lm_head.weight, target=rows).loss / len(states)
    loss.backward()
    expected = {name: parameter.grad for name, parameter in fresh.model.named_parameters()}
    assert "model.embed_tokens.weight" not in caught  # frozen
    assert set(caught) == set(expected) - {"model.embed_tokens.weight"}
    for name, gradient in caught.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6, msg=name)


def run_with_callback(
    drafter: DraftModel, target: Target, samples: Samples, out_dir: Path, callback: Any, **fields: Any
) -> None:
    import distill.trainer as trainer_module

    original = trainer_module.run_training

    def with_callback(run: Any) -> Any:
        import dataclasses

        return original(dataclasses.replace(run, callbacks=(callback,)))

    trainer_module.run_training = with_callback  # type: ignore[assignment]
    try:
        train(drafter, target, samples, out_dir, **fields)
    finally:
        trainer_module.run_training = original


def test_embedding_is_frozen_and_the_rest_moves(
    target: Target, make_samples: Callable[..., Samples], tmp_path: Path
) -> None:
    drafter = new_drafter(target)
    before = {name: value.clone() for name, value in drafter.model.state_dict().items()}
    after = train(drafter, target, make_samples(12), tmp_path, tokens=100)
    assert torch.equal(after["model.embed_tokens.weight"], before["model.embed_tokens.weight"])
    assert all(not torch.equal(after[n], before[n]) for n in before if n != "model.embed_tokens.weight")


def test_a_tied_head_is_trained_and_stays_tied(
    target: Target,
    make_samples: Callable[..., Samples],
    make_llama: Callable[..., LlamaForCausalLM],
    tmp_path: Path,
) -> None:
    drafter = DraftModel(make_llama(4, hidden=16, layers=1), None)
    before = drafter.model.lm_head.weight.detach().clone()
    train(drafter, target, make_samples(12), tmp_path, tokens=100)
    assert not torch.equal(drafter.model.lm_head.weight, before)
    kept = load_drafter(tmp_path / "drafter", "cpu")
    assert kept.model.lm_head.weight is kept.model.model.embed_tokens.weight


@pytest.mark.parametrize("loss", ["forward_kl", "tvd", "lk_hybrid", "cross_entropy", "argmax"])
def test_training_raises_acceptance(
    loss: str, target: Target, make_samples: Callable[..., Samples], tmp_path: Path, drafter: DraftModel
) -> None:
    """On the samples themselves (select is a copy of train): each loss must lift what it is meant for."""
    samples = make_samples(12)
    chosen = [index for index, record in enumerate(samples) if record.split == "train"]
    assert samples.locations is not None
    from dataclasses import replace

    both = Samples(
        [replace(samples[i], split=split) for split in ("train", "select") for i in chosen],
        [samples.locations[i] for _ in range(2) for i in chosen],
    )
    config = TrainConfig(loss=LossConfig(name=loss), tokens=40 * 70, learning_rate=5e-3, batch_size=4)  # type: ignore[arg-type]
    result = train_drafter(
        drafter,
        target,
        both,
        config,
        temperature=1.0,
        seed=0,
        out_dir=tmp_path,
        report=ignore,
        metric="sampled",
    )
    first = result.history[0]
    if loss in ("cross_entropy", "argmax"):  # the best id is all that they ask for
        assert max(check["greedy"] for check in result.history) > first["greedy"] + 0.2
    else:
        assert result.best["sampled"] > first["sampled"] + 0.05
    assert result.best == {
        key: value for key, value in best_check(result.history, "sampled").items() if key != "step"
    }


def test_bfloat16_drafters_train_in_float32_and_return_in_bfloat16(
    target: Target, make_samples: Callable[..., Samples], tmp_path: Path
) -> None:
    from distill.models import cast_parameters

    drafter = new_drafter(target)
    cast_parameters(drafter.model, torch.bfloat16)
    seen = []

    def report(step: int, steps: int, tokens: int, measures: dict[str, float]) -> None:
        seen.append(drafter.model.dtype)

    train(drafter, target, make_samples(12), tmp_path, tokens=60, report=report)
    assert set(seen) == {torch.float32}
    assert drafter.model.dtype == torch.bfloat16
    kept = load_drafter(tmp_path / "drafter", "cpu")
    assert kept.model.dtype == torch.bfloat16


# --- results, resume ---


def test_the_best_drafter_is_saved_and_nothing_else_is_left(
    target: Target, make_samples: Callable[..., Samples], tmp_path: Path, drafter: DraftModel
) -> None:
    calls = []

    def report(step: int, steps: int, tokens: int, measures: dict[str, float]) -> None:
        calls.append((step, steps, tokens, measures))

    samples = make_samples(20)
    result = train_drafter(
        drafter,
        target,
        samples,
        TrainConfig(tokens=300, learning_rate=3e-3, batch_size=4),
        temperature=1.0,
        seed=0,
        out_dir=tmp_path / "out",
        report=report,
        metric="sampled",
    )
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["drafter"]
    assert result.directory == tmp_path / "out" / "drafter"
    assert [call[0] for call in calls] == list(range(1, result.steps + 1))
    assert {call[1] for call in calls} == {result.steps} and calls[-1][2] == result.tokens >= 300
    assert {"loss", "train_sampled", "sampled", "argmax", "greedy"} <= set(calls[-1][3])
    assert [check["step"] for check in result.history] == [0, *check_steps(result.steps)]
    steps = [entry["step"] for entry in result.losses]
    assert steps == sorted(set(steps)) and steps[-1] <= result.steps and len(steps) > 2
    assert all(entry["loss"] > 0 for entry in result.losses)
    assert result.best["sampled"] == max(check["sampled"] for check in result.history)
    from evaluation.acceptance import teacher_forced

    kept = load_drafter(result.directory, "cpu")
    held_out = held_out_samples(samples, "sampled", 1.0, 6)
    table = teacher_forced(kept, target.model.lm_head.weight, held_out, temperature=1.0, batch_size=8)
    assert table.means()["sampled"] == pytest.approx(result.best["sampled"], abs=1e-7)
    assert "forward" not in vars(drafter.model)  # trl's and our forward are off again


class Killed(Exception):
    pass


def test_a_killed_run_ends_with_the_same_bits(
    target: Target, make_samples: Callable[..., Samples], tmp_path: Path
) -> None:
    samples = make_samples(20)
    fields: dict[str, Any] = {"tokens": 600, "accumulation": 2, "batch_size": 2}
    straight = train(new_drafter(target), target, samples, tmp_path / "straight", **fields)
    steps: list[int] = []

    def killer(last: int) -> Callable[..., None]:
        def report(step: int, steps_in_all: int, tokens: int, measures: dict[str, float]) -> None:
            steps.append(step)
            if step == last:
                raise Killed

        return report

    for last in (1, 11, 17):  # before the first checkpoint, after some, and again
        with pytest.raises(Killed):
            train(new_drafter(target), target, samples, tmp_path / "killed", report=killer(last), **fields)
    # the newest checkpoint is half written: the one before it is used
    newest = max(
        (tmp_path / "killed" / "checkpoints").iterdir(), key=lambda path: int(path.name.split("-")[1])
    )
    (newest / "complete.json").unlink()
    (newest / "model.safetensors").write_bytes(b"torn")
    resumed = train(new_drafter(target), target, samples, tmp_path / "killed", report=killer(-1), **fields)
    starts = [0, *(index for index in range(1, len(steps)) if steps[index] <= steps[index - 1])]
    assert (
        len(starts) == 4 and steps[starts[1]] == 1 and steps[starts[2]] > 1 and steps[starts[3]] > 1
    )  # it did resume
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
    ours, theirs = (
        load_file(tmp_path / run / "drafter" / "model.safetensors") for run in ("straight", "killed")
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_checkpoints_of_another_run_are_not_resumed(
    target: Target, make_samples: Callable[..., Samples], tmp_path: Path
) -> None:
    samples = make_samples(20)
    first_steps: list[int] = []

    def report(step: int, steps: int, tokens: int, measures: dict[str, float]) -> None:
        first_steps.append(step)
        if len(first_steps) == 7:
            raise Killed

    with pytest.raises(Killed):
        train(new_drafter(target), target, samples, tmp_path, report=report)
    assert any((tmp_path / "checkpoints").glob("checkpoint-*/complete.json"))
    train(new_drafter(target), target, samples, tmp_path, report=report, learning_rate=1e-3)
    assert first_steps[7] == 1


def test_divergence_is_one_sentence(
    target: Target, make_samples: Callable[..., Samples], tmp_path: Path, drafter: DraftModel
) -> None:
    with torch.no_grad():
        drafter.model.model.norm.weight.fill_(torch.nan)
    with pytest.raises(UserError, match=r"diverged.*lower train\.learning_rate"):
        train(drafter, target, make_samples(12), tmp_path)


def test_samples_that_cannot_be_trained_on(
    target: Target, make_samples: Callable[..., Samples], tmp_path: Path, drafter: DraftModel
) -> None:
    samples = make_samples(12)
    with pytest.raises(UserError, match=r"set train\.signal=live"):
        train(drafter, target, Samples(samples.records, None), tmp_path)
    with pytest.raises(UserError, match="nothing to train on"):
        train(drafter, target, samples.where(split="select"), tmp_path)


def test_golden_trajectory(tmp_path: Path) -> None:
    """20 steps on a CPU against recorded numbers; `python tests/golden/trajectory.py` records them."""
    spec = importlib.util.spec_from_file_location("trajectory", GOLDEN / "trajectory.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    golden = json.loads(module.GOLDEN.read_text())
    for loss in module.LOSSES:
        found = module.trajectory(loss, tmp_path / loss)
        for name, values in golden[loss].items():
            differences = [ours - theirs for ours, theirs in zip(found[name], values, strict=True)]
            # other processors round otherwise, and training amplifies; one-sided drift shows in the mean
            assert max(map(abs, differences)) < (0.03 if name == "greedy" else 2e-3), (loss, name)
            assert abs(sum(differences)) / len(differences) < (0.03 if name == "greedy" else 5e-4), (
                loss,
                name,
            )
        assert found["loss"][-1] < found["loss"][0]


def test_model_parameters_of_the_caller_train(target: Target, drafter: DraftModel) -> None:
    from distill.training_arguments import set_trainable

    model: PreTrainedModel = drafter.model.requires_grad_(False)
    set_trainable(model)
    assert [name for name, parameter in model.named_parameters() if not parameter.requires_grad] == [
        "model.embed_tokens.weight"
    ]


# --- other ways to the same numbers ---


def other_form(samples: Samples, form: Callable[[Signals], Any]) -> Samples:
    """The same samples with their signals kept in another form."""
    kept = [samples.signals(index) for index in range(len(samples))]
    return Samples(samples.records, [(form(one), 0) for one in kept if isinstance(one, Signals)])


@pytest.mark.parametrize("signal", ["hidden_half", "topk"])
def test_smaller_signals_train_nearly_alike(
    signal: str, target: Target, make_samples: Callable[..., Samples], tmp_path: Path
) -> None:
    samples, head = make_samples(24), target.model.lm_head.weight.detach()
    forms: dict[str, Callable[[Signals], Any]] = {
        "hidden_half": in_half,
        "topk": partial(top_k_of, head_VH=head, count=90, temperature=1.0),
    }
    losses: dict[str, list[float]] = {}
    for name in ("hidden", signal):
        seen: list[float] = []

        def report(
            step: int, steps: int, tokens: int, measures: dict[str, float], seen: list[float] = seen
        ) -> None:
            seen.append(measures.get("loss", 0.0))

        given = samples if name == "hidden" else other_form(samples, forms[signal])
        train(new_drafter(target), target, given, tmp_path / name, signal=name, report=report, tokens=250)
        losses[name] = seen
    assert losses["hidden"] != losses[signal]
    assert losses[signal] == pytest.approx(losses["hidden"], rel=2e-2 if signal == "topk" else 2e-3)


def test_packed_rows_equal_padded_ones(
    target: Target, make_samples: Callable[..., Samples], tmp_path: Path
) -> None:
    samples = make_samples(20)
    drafter, indices = new_drafter(target), [0, 1, 2, 3, 4]
    padded, packed = collate(samples, indices, target.pad_id), pack(samples, indices, target.pad_id)
    assert packed.input_ids.shape == (1, sum(len(samples[index].input_ids) for index in indices))
    assert packed.position_ids is not None and int((packed.position_ids == 0).sum()) == len(indices)
    gradients = []
    for batch in (padded, packed):
        drafter.model.zero_grad()
        told = target_signals(target.model, batch, 1.0)
        states = completion_states(drafter.model, batch.input_ids, batch.completion_mask, batch.position_ids)
        rows = TargetRows(told.hidden, target.model.lm_head.weight[VOCAB], told.logsumexp)
        chunked_loss("forward_kl", states, drafter.model.lm_head.weight, target=rows).loss.backward()
        gradients.append(
            (
                told.hidden,
                {n: p.grad.clone() for n, p in drafter.model.named_parameters() if p.grad is not None},
            )
        )
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-5)
    without = packed.position_ids.new_tensor(range(packed.input_ids.shape[1])).unsqueeze(0)
    mixed = completion_states(target.model, packed.input_ids, packed.completion_mask, without)
    assert not torch.allclose(
        mixed, gradients[0][0], atol=1e-2
    )  # texts that look at each other are another thing
    for signal in ("hidden", "live"):
        ours, theirs = (
            train(
                new_drafter(target),
                target,
                samples,
                tmp_path / f"{signal}{packing}",
                signal=signal,
                packing=packing,
            )
            for packing in (True, False)
        )
        assert_close(ours, theirs, 1e-4)


def test_gradient_checkpointing_changes_nothing_but_memory(
    target: Target, make_samples: Callable[..., Samples], tmp_path: Path
) -> None:
    samples, calls, weights = make_samples(12), [], []
    for checkpointing in (False, True):
        drafter, seen = new_drafter(target), [0]

        def count(module: torch.nn.Module, inputs: Any, seen: list[int] = seen) -> None:
            seen[0] += torch.is_grad_enabled()

        hook = drafter.model.model.layers[0].mlp.register_forward_pre_hook(count)
        out_dir = tmp_path / str(checkpointing)
        fields: dict[str, Any] = {"tokens": 100, "gradient_checkpointing": checkpointing}
        weights.append(train(drafter, target, samples, out_dir, **fields))
        hook.remove()
        calls.append(seen[0])
    assert calls[0] > 0 and calls[1] in (
        calls[0],
        2 * calls[0],
    )  # computed again, or first without a gradient
    assert_close(*weights, 1e-6)


def test_bfloat16_products_over_float32_weights(
    target: Target, make_samples: Callable[..., Samples], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU does with a bfloat16 drafter, on a CPU."""
    import distill.trainer

    samples, losses = make_samples(12), {}
    for mixed in (False, True):
        monkeypatch.setattr(distill.trainer, "is_mixed", lambda *_, mixed=mixed: mixed)
        seen: list[float] = []

        def report(
            step: int, steps: int, tokens: int, measures: dict[str, float], seen: list[float] = seen
        ) -> None:
            seen.append(measures.get("loss", 0.0))

        weights = train(
            new_drafter(target), target, samples, tmp_path / str(mixed), tokens=150, report=report
        )
        assert {value.dtype for value in weights.values()} == {torch.float32}
        losses[mixed] = seen
    assert losses[True] != losses[False]
    assert losses[True] == pytest.approx(losses[False], rel=0.05)


class Poison:
    """Spoils the gradient of some steps, before it is clipped."""

    def __init__(self, steps: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
        from distill.trainer import DistillTrainer

        original = DistillTrainer._clip_grad_norm

        def spoil(trainer: Any, model: torch.nn.Module) -> Any:
            if trainer.state.global_step + 1 in steps:
                next(p for p in model.parameters() if p.grad is not None).grad.fill_(torch.nan)  # type: ignore[union-attr]
            return original(trainer, model)

        monkeypatch.setattr(DistillTrainer, "_clip_grad_norm", spoil)


def test_a_step_without_a_finite_gradient_is_left_out_and_counted(
    target: Target, make_samples: Callable[..., Samples], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from distill import training_arguments

    samples = make_samples(20)
    monkeypatch.setattr(training_arguments, "_CLIP", 0.1)
    Poison({3, 4, 6}, monkeypatch)
    config = TrainConfig(tokens=500, learning_rate=3e-3, batch_size=4)

    def run(out_dir: Path, last: int) -> tuple[DraftModel, Any]:
        drafter = new_drafter(target)

        def report(step: int, steps: int, tokens: int, measures: dict[str, float]) -> None:
            if step == last:
                raise Killed

        return drafter, train_drafter(
            drafter, target, samples, config, temperature=1.0, seed=0, out_dir=out_dir, report=report
        )

    drafter, result = run(tmp_path / "straight", -1)
    assert result.steps > 8 and result.skipped_steps == 3
    assert 0 < result.clipped_steps <= result.steps - 3
    assert all(value.isfinite().all() for value in drafter.model.state_dict().values())
    with pytest.raises(Killed):
        run(tmp_path / "killed", 7)
    _, resumed = run(tmp_path / "killed", -1)  # the counts go on, too
    assert (resumed.skipped_steps, resumed.clipped_steps) == (3, result.clipped_steps)


def test_several_steps_in_a_row_without_one_end_the_training(
    target: Target, make_samples: Callable[..., Samples], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Poison({3, 4, 5}, monkeypatch)
    with pytest.raises(UserError, match=r"diverged.*3 steps in a row.*step 5.*lower train\.learning_rate"):
        train(new_drafter(target), target, make_samples(20), tmp_path, tokens=500)


def test_options_that_are_not_in_use_are_no_part_of_the_key() -> None:
    plain = TrainConfig(tokens=1)
    assert plain.identity() == TrainConfig(tokens=1, optimizer="adamw", packing=False).identity()
    used = [{"optimizer": "adamw_8bit"}, {"packing": True}, {"gradient_checkpointing": True}, {"lora": {}}]
    found = [str(TrainConfig.model_validate({"tokens": 1, **fields}).identity()) for fields in used]
    assert len({str(plain.identity()), *found}) == 5
