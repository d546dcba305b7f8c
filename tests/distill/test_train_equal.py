"""Ways to train that come to the same: signals, accumulation, packing, precision."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from data.records import Samples, collate, pack
from data.signals import Signals
from distill.batch_plan import BatchPlan, plan_batches
from distill.chunked import TargetRows, chunked_loss
from distill.models import Target
from distill.prune import prune
from evaluation.decoder.drafters import DraftModel
from evaluation.signals import completion_states, in_half, target_signals, top_k_of
from tests.distill.training import VOCAB, new_drafter, run_with_callback, train


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
        plan = BatchPlan(batches, tokens, accumulation)
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
