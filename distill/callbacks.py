"""What happens between the steps of a training: held-out checks and reports of progress."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from distill.interrupts import ask

if TYPE_CHECKING:
    from distill.trainer import DistillTrainer, TrainingRun

HELD_OUT = "held_out"
"""Key of the checks in the trainer state's history, where a checkpoint keeps them."""


class Checks(TrainerCallback):
    """Held-out checks before the first step and after the planned ones."""

    def __init__(self, trainer: DistillTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step == 0:
            self.trainer.check()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step in self.trainer.spec.check_steps:
            self.trainer.check()


class Interrupts(TrainerCallback):
    """Ends training with a checkpoint after the step in which a signal came; in all processes at once,
    whichever of them it came to."""

    def __init__(self, trainer: DistillTrainer, asked: Callable[[], int]) -> None:
        self.trainer, self.asked = trainer, asked

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        here = torch.tensor(self.asked(), device=args.device)
        if number := int(self.trainer.accelerator.gather(here).max()):
            ask(number)
            control.should_save = control.should_training_stop = True


class Reporter(TrainerCallback):
    """Hands every step to `report`, with the newest loss and acceptances."""

    def __init__(self, run: TrainingRun) -> None:
        self.run = run
        self.newest: dict[str, float] = {}

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        wanted = ("loss", "train_sampled")
        self.newest |= {key: float(value) for key, value in (logs or {}).items() if key in wanted}

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        for entry in reversed(state.log_history):
            if HELD_OUT in entry:
                self.newest |= {key: value for key, value in entry[HELD_OUT].items() if key != "step"}
                break
        tokens = self.run.plan.tokens_after(state.global_step)
        self.run.report(state.global_step, self.run.plan.steps, tokens, dict(self.newest))
