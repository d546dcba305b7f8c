"""Gradients that are too long, or no numbers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from data.errors import UserError
from data.records import Samples
from distill.models import Target
from distill.train import TrainConfig, train_drafter
from evaluation.decoder.drafters import DraftModel
from tests.distill.training import Killed, new_drafter, train


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


def test_divergence_is_one_sentence(
    target: Target, make_samples: Callable[..., Samples], tmp_path: Path
) -> None:
    drafter = new_drafter(target)
    with torch.no_grad():
        drafter.model.model.norm.weight.fill_(torch.nan)
    with pytest.raises(UserError, match=r"diverged.*lower train\.learning_rate"):
        train(drafter, target, make_samples(12), tmp_path)
