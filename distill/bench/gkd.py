"""trl's GKDTrainer on our samples, batches and schedule: the peer that forward KL has to agree with.

Off-policy (lmbda 0) at beta 0 its loss is forward KL over the whole vocabulary, computed from logits of both
models; it takes no reduced draft vocabulary. In trl 1.16 its loss is at temperature 1 whatever GKDConfig
says.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor

from data.errors import UserError
from data.records import Samples, collate
from distill.batch_plan import BatchPlan, plan_batches
from distill.models import Target, without_bars
from distill.train import TrainConfig
from distill.training_arguments import set_trainable, training_arguments
from evaluation.decoder.drafters import DraftModel

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")


def train_gkd(
    drafter: DraftModel, target: Target, samples: Samples, config: TrainConfig, *, seed: int, out_dir: Path
) -> None:
    """Train `drafter` in place, as `distill.train.train_drafter` does with forward KL at temperature 1.

    Raises `UserError` for a reduced draft vocabulary.
    """
    from transformers.trainer_callback import PrinterCallback
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    if drafter.vocab is not None:
        raise UserError("trl's GKDTrainer takes no reduced draft vocabulary: set draft.vocab_size to null.")
    train = samples.where(split="train")
    plan: BatchPlan = plan_batches(
        [(len(record.input_ids), record.completion_tokens) for record in train],
        batch_size=config.batch_size,
        tokens=config.tokens,
        accumulation=config.accumulation,
        seed=seed,
    )
    arguments = training_arguments(
        GKDConfig,
        steps=plan.steps,
        config=config,
        seed=seed,
        output_dir=out_dir,
        on_cpu=target.model.device.type == "cpu",
        save_strategy="no",
        lmbda=0.0,
        beta=0.0,
        disable_dropout=False,
    )
    set_trainable(drafter.model)
    with without_bars():
        trainer = GKDTrainer(
            model=drafter.model,
            teacher_model=target.model,
            args=arguments,
            data_collator=_Collator(train, target.pad_id),
            train_dataset=Dataset.from_dict({"samples": plan.batches}),
            processing_class=target.tokenizer,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    drafter.model.__dict__.pop("forward", None)
    drafter.model.eval()


@dataclass(frozen=True)
class _Collator:
    """One row of the plan as trl's batches are: labels of -100 where there is nothing to learn."""

    samples: Samples
    pad_id: int

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        (row,) = rows
        batch = collate(self.samples, row["samples"], self.pad_id)
        return {
            "input_ids": batch.input_ids,
            "attention_mask": batch.attention_mask,
            "labels": torch.where(batch.completion_mask, batch.input_ids, -100),
        }
