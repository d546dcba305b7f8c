"""Short trainings of tiny drafters, for the tests of what training does."""

from pathlib import Path
from typing import Any

import torch

from data.records import Samples
from distill.models import Target
from distill.prune import prune
from distill.train import TrainConfig, train_drafter
from evaluation.decoder.drafters import DraftModel

VOCAB = torch.arange(0, 96, 2)


def ignore(step: int, steps: int, tokens: int, measures: dict[str, float]) -> None:
    pass


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


class Killed(Exception):
    pass


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
