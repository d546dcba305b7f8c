"""The training step on trl's SFTTrainer: our data, our loss from hidden states, checks and checkpoints.

Only `distill.train` imports this module, inside a function: importing trl takes nine seconds.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import TrainerCallback
from transformers.trainer_callback import PrinterCallback
from transformers.utils import logging
from trl import SFTConfig, SFTTrainer

from data.errors import UserError
from data.records import Batch, Samples
from distill import interrupts
from distill.batch_plan import BatchPlan
from distill.callbacks import HELD_OUT, Checks, Interrupts, Reporter
from distill.checkpoints import newest_checkpoint, seal
from distill.data_selection import chosen_count
from distill.head_loss import head_forward, head_inputs
from distill.heads import row_of_id
from distill.lora import add_lora, merged, remove_lora
from distill.models import Target, cast_parameters, empty_model, save_drafter, without_bars
from distill.rollouts import Rollouts
from distill.train import ACCEPTED, Metric, Report, TrainConfig, best_check
from distill.training_arguments import is_mixed, set_trainable, training_arguments
from distill.training_step import Collator, loss_forward
from evaluation.acceptance import accepted_drafts, by_position
from evaluation.decoder.drafters import DraftModel
from evaluation.decoder.heads import HeadModel
from evaluation.head import head_of
from evaluation.signals import completion_states, target_signals

_CHECKPOINTS = 10  # per run
_SKIPPED_IN_A_ROW = 3  # steps without a finite gradient that end the training
_GUARDS = "guards"
"""Key of their counts in the trainer state's history."""


@dataclass(frozen=True)
class TrainingRun:
    """Everything a training run needs, decided by `distill.train`."""

    drafter: DraftModel
    target: Target
    train: Samples
    held_out: Samples
    plan: BatchPlan
    config: TrainConfig
    temperature: float
    seed: int
    metric: Metric
    check_steps: list[int]
    identity: str
    """Hash of plan and settings: a checkpoint of another run is never resumed."""
    checkpoints: Path
    best: Path
    report: Report
    reference: list[Tensor] | None = None
    """Per training sample the reference's forward KL of each completion token, where tokens are chosen."""
    callbacks: tuple[TrainerCallback, ...] = ()


def run_training(run: TrainingRun) -> tuple[list[dict[str, float]], list[dict[str, float]], dict[str, int]]:
    """Train, resuming from the newest whole checkpoint; returns all held-out checks, the losses on the way,
    and how many steps were clipped and skipped. The best drafter is in `run.best`."""
    dtype = run.drafter.model.dtype
    processes = PartialState(cpu=run.target.model.device.type == "cpu")
    with processes.main_process_first():  # what it deletes, the others do not see
        newest = newest_checkpoint(run.checkpoints, run.identity) if run.best.is_dir() else None
        if newest is None:
            shutil.rmtree(run.checkpoints, ignore_errors=True)
    processes.wait_for_everyone()
    cast_parameters(run.drafter.model, torch.float32)
    if run.config.lora is None:
        set_trainable(run.drafter.model)
    else:
        add_lora(run.drafter.model, run.config.lora, run.seed)
    trainer = DistillTrainer(run, save_dtype=dtype)
    try:
        with without_bars(), _errors_only(), interrupts.deferred() as asked:
            trainer.add_callback(Interrupts(trainer, asked))
            trainer.train(resume_from_checkpoint=None if newest is None else str(newest))
    finally:
        # Both trl and we replace the forward of the model given; it goes back to the caller as it came
        run.drafter.model.__dict__.pop("forward", None)
    if run.config.lora is not None:
        remove_lora(run.drafter.model, run.config.lora)
    cast_parameters(run.drafter.model, dtype)
    run.drafter.model.eval()
    return trainer.checks(), trainer.losses(), trainer.guards()


@contextmanager
def _errors_only() -> Iterator[None]:
    """transformers' notes on special tokens, file times and the like would break up the progress bar."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


class DistillTrainer(SFTTrainer):
    """SFTTrainer with our batches and a loss from hidden states at completion positions."""

    # compute_loss divides by the completion tokens of the whole accumulated batch
    loss_is_scaled_for_ga = True

    def __init__(self, run: TrainingRun, save_dtype: torch.dtype) -> None:
        model = run.drafter.model
        device_type = run.target.model.device.type
        mixed = is_mixed(save_dtype, device_type)
        super().__init__(
            model=model,
            args=training_arguments(
                SFTConfig,
                steps=run.plan.steps,
                config=run.config,
                seed=run.seed,
                output_dir=run.checkpoints,
                on_cpu=device_type == "cpu",
                mixed=mixed,
                save_strategy="steps",
                save_steps=max(1, round(run.plan.steps / _CHECKPOINTS)),
                save_total_limit=2,
            ),
            data_collator=Collator(run),
            train_dataset=Dataset.from_dict({"samples": run.plan.shares(PartialState().num_processes)}),
            processing_class=run.target.tokenizer,
            callbacks=[Checks(self), Reporter(run), *run.callbacks],
        )
        self.remove_callback(PrinterCallback)
        if self.is_fsdp_enabled and (run.config.optimizer != "adamw" or run.config.lora is not None):
            raise UserError("8-bit optimizers and adapters are not sharded: leave FSDP out, ACCELERATE=ddp.")
        self.spec, self.save_dtype, self.mixed = run, save_dtype, mixed
        device = self.args.device
        head, vocab = head_of(run.target.model).detached(), run.drafter.vocab
        # The loss is computed inside forward, where DDP and FSDP see every parameter that takes part
        model.forward = MethodType(
            partial(
                head_forward if isinstance(model, HeadModel) else loss_forward,
                eta=run.config.loss.eta,
                beta=run.config.loss.beta,
                temperature=run.temperature,
                share=run.config.learnable_share,
                target_head=head.rows(vocab).to(device),
                rows=row_of_id(vocab, len(head), device),
            ),
            model,
        )
        on_policy = run.config.on_policy
        self.rollouts = on_policy and Rollouts(
            run.drafter, run.target, on_policy, run.temperature, run.seed, len(run.plan.batches)
        )
        # Since the last log: the summed acceptance, and the tokens it was summed over
        self._overlap = torch.zeros(2, dtype=torch.float64, device=device)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | int | None]:
        """The batches of one step, and the tokens that they train on over all processes: what the loss is
        divided by."""
        batches = list(islice(epoch_iterator, num_batches))
        if self.rollouts:
            part = slice(self.accelerator.process_index, None, self.accelerator.num_processes)
            first = self.state.global_step * self.spec.plan.batches_per_step
            for place, batch in enumerate(batches):
                if self.rollouts.wants(first + place):
                    batch.pop("reference", None)  # nobody measured it on text that is yet to be drawn
                    if batch["completion_mask"].any():
                        batches[place] = self.rollouts.batch(batch, first + place, part)
        own = torch.tensor([int(batch["completion_mask"][:, 1:].sum()) for batch in batches], device=device)
        tokens = self.accelerator.reduce(own, "sum")
        share = self.spec.config.learnable_share
        for place, batch in enumerate(batches):
            if share is not None and "reference" in batch:
                tokens[place] = chosen_count(int(tokens[place]), share)
        return batches, tokens.sum()

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The summed loss over the tokens trained on, divided by their count over the whole step."""
        assert num_items_in_batch is not None and not return_outputs
        run = self.spec
        name = run.config.loss.at(self.state.global_step, run.plan.steps)
        if isinstance(run.drafter.model, HeadModel):
            needed = name != "cross_entropy"
            told = head_inputs(run.target.model, run.drafter.model, inputs, run.temperature, needed)
            inputs = {**inputs, **told}
        elif name != "cross_entropy" and not {"hidden", "ids"} & set(inputs):
            inputs = {**inputs, **self._ask_target(inputs)}
        loss, overlap, tokens = model(name=name, **inputs)
        if overlap is not None:
            self._overlap += torch.stack([overlap.double(), tokens.double()])
        # DDP and FSDP take the mean over processes of gradients that we have divided by the global count
        return loss / num_items_in_batch * self.accelerator.num_processes

    def _ask_target(self, inputs: dict[str, Any]) -> dict[str, Tensor]:
        """The target's signals of a batch by a forward pass now.

        Over the full vocabulary without their normaliser, which the loss finds from the logits that it makes
        anyway: a product with the whole head less.
        """
        run, ids, mask = self.spec, inputs["input_ids"], inputs["completion_mask"]
        positions = inputs.get("position_ids")
        if run.drafter.vocab is None:
            with torch.no_grad():
                return {"hidden": completion_states(run.target.model, ids, mask, positions)}
        batch = Batch(ids, inputs["attention_mask"], mask, None, positions)
        return target_signals(run.target.model, batch, run.temperature).tensors()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the training batches' own acceptance."""
        if "loss" in logs:
            # All processes log at the same steps
            overlap, tokens = self.accelerator.reduce(self._overlap, "sum").tolist()
            if tokens:
                logs["train_sampled"] = overlap / tokens
            self._overlap.zero_()
        super().log(logs, start_time)

    def _clip_grad_norm(self, model: torch.nn.Module) -> Any:
        """Clip, count, and leave out a step whose gradient is not finite; several in a row end the training.

        All processes see the norm of the whole gradient, so all decide alike.
        """
        norm = super()._clip_grad_norm(model)
        length, counts = float(norm), self.guards()
        if math.isfinite(length):
            counts["clipped"] += length > self.args.max_grad_norm
            counts["in_a_row"] = 0
            return norm
        counts["skipped"] += 1
        counts["in_a_row"] += 1
        if counts["in_a_row"] >= _SKIPPED_IN_A_ROW:
            raise UserError(
                f"Training diverged: the gradient of {counts['in_a_row']} steps in a row was not finite, the "
                f"last at step {self.state.global_step + 1}; lower train.learning_rate "
                f"(it is {self.args.learning_rate:g})."
            )
        model.zero_grad()  # without gradients the optimizer's step changes nothing
        return norm

    def guards(self) -> dict[str, int]:
        """Steps clipped and skipped so far; like the checks, a checkpoint holds them."""
        for entry in self.state.log_history:
            if _GUARDS in entry:
                return entry[_GUARDS]
        counts = {"clipped": 0, "skipped": 0, "in_a_row": 0}
        self.state.log_history.append({"step": 0, _GUARDS: counts})
        return counts

    def checks(self) -> list[dict[str, float]]:
        """The held-out checks so far; they live in the trainer's state, so a checkpoint holds them."""
        return [entry[HELD_OUT] for entry in self.state.log_history if HELD_OUT in entry]

    def losses(self) -> list[dict[str, float]]:
        """The training loss so far: `loss`, the mean over some steps, at the last of them, `step`."""
        return [
            {"step": entry["step"], "loss": entry["loss"]}
            for entry in self.state.log_history
            if "loss" in entry
        ]

    def check(self) -> dict[str, float]:
        """Measure held-out acceptance now, and save the drafter where it is the best so far."""
        run = self.spec
        cached = run.held_out.has_exact_signals(run.target.model.dtype)
        # Sharded weights are gathered by all processes; whole ones are copied where they are saved
        gathered = self._snapshot() if self.is_fsdp_enabled else None
        with self._autocast():
            tables = by_position(
                gathered or run.drafter,
                head_of(run.target.model).detached(),
                run.held_out,
                temperature=run.temperature,
                batch_size=2 * run.config.batch_size,
                signals=None
                if cached
                else partial(target_signals, run.target.model, temperature=run.temperature),
                target=run.target.model,
            )
        found = {"step": self.state.global_step, **tables[0].means()}
        if isinstance(run.drafter.model, HeadModel):
            found[ACCEPTED] = accepted_drafts(tables, run.metric)
            later = {f"{run.metric}_{number}": table for number, table in enumerate(tables[1:], start=2)}
            found |= {name: table.means()[run.metric] for name, table in later.items()}
        self.state.log_history.append({"step": self.state.global_step, HELD_OUT: found})
        if best_check(self.checks(), run.metric) is found and self.is_world_process_zero():
            save_drafter(gathered or self._snapshot(), run.best, run.target.tokenizer)
        return found

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.args.device.type, dtype=torch.bfloat16) if self.mixed else nullcontext()

    def _snapshot(self) -> DraftModel:
        """The whole drafter in the dtype that it came in; with FSDP every process has to ask, and gets it."""
        drafter = self.spec.drafter
        lora = self.spec.config.lora
        if drafter.model.dtype == self.save_dtype and lora is None and not self.is_fsdp_enabled:
            return drafter
        head_rows = None if drafter.vocab is None else len(drafter.vocab)
        config = drafter.model.config.from_dict(drafter.model.config.to_dict())
        config.dtype = self.save_dtype
        copy = empty_model(config, head_rows=head_rows)
        weights = drafter.model.state_dict()
        if self.is_fsdp_enabled:
            weights = get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True))
        copy.load_state_dict(weights if lora is None else merged(weights, lora))
        copy.generation_config = drafter.model.generation_config
        return DraftModel(copy.to(self.args.device).eval(), drafter.vocab)

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        # Past SFTTrainer's version, which writes a model card; the marker comes after every byte is on disk
        super(SFTTrainer, self)._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()
        if self.is_world_process_zero():
            folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
            seal(folder, self.spec.identity)
