"""What the trainers of trl are told: the optimizer, its schedule, and what not to do by themselves."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from trl import SFTConfig

from distill.quantize import TRAINER_NAMES
from evaluation.decoder.heads import HeadModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from distill.train import TrainConfig

_LOGS = 50  # per run
_WARMUP_SHARE = 0.05
_WEIGHT_DECAY = 0.01
_CLIP = 1.0


def training_arguments(
    kind: type[SFTConfig],
    *,
    steps: int,
    config: TrainConfig,
    seed: int,
    output_dir: Path,
    on_cpu: bool,
    mixed: bool = False,
    **more: Any,
) -> Any:
    """The arguments of a training of one row of the plan per batch, for trl's trainers of that kind; `mixed`:
    products in bfloat16, over float32 weights."""
    arguments = kind(
        output_dir=str(output_dir),
        per_device_train_batch_size=1,  # one row of the plan is one batch
        gradient_accumulation_steps=config.accumulation,
        max_steps=steps,
        train_sampling_strategy="sequential",
        learning_rate=config.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, round(_WARMUP_SHARE * steps)),
        optim=TRAINER_NAMES[config.optimizer],
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=_WEIGHT_DECAY,
        max_grad_norm=_CLIP,
        bf16=mixed,
        use_cpu=on_cpu,
        seed=seed,
        data_seed=seed,
        activation_checkpointing=config.gradient_checkpointing,
        logging_steps=max(1, steps // _LOGS),
        logging_nan_inf_filter=True,  # what is not finite is counted by `DistillTrainer._clip_grad_norm`
        eval_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        dataset_kwargs={"skip_prepare_dataset": True},
        dataloader_pin_memory=not on_cpu,
        max_length=None,
        ddp_find_unused_parameters=False,
        **more,
    )
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1  # one process, one device: Trainer would wrap the model in nn.DataParallel
    return arguments


def is_mixed(dtype: torch.dtype, device_type: str) -> bool:
    """Do the products of a drafter that came in `dtype` run in bfloat16, over float32 weights?"""
    return dtype == torch.bfloat16 and device_type == "cuda" and torch.cuda.is_bf16_supported()


def set_trainable(model: PreTrainedModel) -> None:
    """All parameters train but an input embedding of its own.

    A frozen embedding is the target's for good: it needs no optimizer state and an export can share it.
    """
    model.requires_grad_(True)
    if isinstance(model, HeadModel):  # its embeddings are the target's
        return
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding.weight is not head.weight:
        embedding.requires_grad_(False)
