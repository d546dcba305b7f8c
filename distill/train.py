"""Train a drafter on a target's samples: what it trains on, when it is checked, and which drafter is kept.

`distill.trainer` holds the step itself, on trl's SFTTrainer; this module decides what it runs on. Everything
that matters is fixed before the first step (which samples, in which batches, in which order), so a run that
was killed and started again ends, on a CPU, with the same bits as one that was not.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from data.errors import UserError
from data.files import canonical_hash
from distill.batch_plan import plan_batches
from distill.lora import LoraConfig, check_peft
from distill.loss_config import LossConfig
from distill.quantize import Optimizer, check_here

if TYPE_CHECKING:
    from data.records import Samples
    from distill.models import Target
    from evaluation.decoder.drafters import DraftModel

Metric = Literal["sampled", "argmax", "greedy"]
Report = Callable[[int, int, int, dict[str, float]], None]
"""Called after every step with (step, steps in all, completion tokens so far, the newest measures)."""

ACCEPTED = "accepted_drafts"
"""Key of a check of heads on the target: accepted drafts of a round, on average over a draft's positions."""
MOST_EPOCHS = 1000  # beyond, a slip of the keyboard is likelier than a wish
_EVALUATIONS = 6  # held-out checks after the one before the first step
_HELD_OUT_SHARE = (
    0.02  # of the training tokens per check: a forward pass costs a third of a step, so < 5 % in all
)


class OnPolicyConfig(BaseModel):
    """Batches whose text is the drafter's own."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    share: float = Field(gt=0, le=1)
    """Of the batches from `start` on."""
    start: float = Field(default=0.5, ge=0, lt=1)
    """The share of training that is done before the first of them."""


class TrainConfig(BaseModel):
    """How a drafter is trained. Warm-up, decay, clipping, checks and checkpoints are derived."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    loss: LossConfig = LossConfig()
    signal: Literal["hidden", "hidden_half", "features", "topk", "live"] = "hidden"
    """`hidden`: the target states that sampling kept; `hidden_half`: those in float16; `features`: those, and
    of every position what EAGLE reads of other layers; `topk`: its `top_k` most likely ids and the mass of
    the rest; `live`: a target forward pass in every step."""
    top_k: int = Field(default=64, gt=0)
    """Ids that the signal `topk` keeps of each token."""
    tokens: int = Field(gt=0, le=10**12)
    """Completion tokens trained on in all; several epochs where the samples hold fewer."""
    learning_rate: float = Field(default=1e-3, gt=0)
    """The highest, reached after the warm-up; decays to 0 on a cosine."""
    batch_size: int = Field(default=16, gt=0)
    """Samples per batch, over all processes: each takes its share of every batch."""
    accumulation: int = Field(default=1, gt=0, le=1_000_000)
    """Batches whose gradients make one step. `lk_hybrid` mixes per batch; the other losses do not notice."""
    temperature: float | None = Field(default=None, gt=0)
    """Divides both models' logits in the loss; where left out, serving.temperature, or 1 where that is 0."""

    learnable_share: float | None = Field(default=None, gt=0, lt=1)
    """Train on this share of each batch's tokens, those where the drafter can still learn most: .4 in
    AdaSPEC. Takes a second training, of the reference that tells which."""
    flat_share: float | None = Field(default=None, gt=0, lt=1)
    """Train on this share of the samples, those with the flattest target distributions."""
    on_policy: OnPolicyConfig | None = None
    """A share of batches late in training with the drafter's own continuations."""
    optimizer: Optimizer = "adamw"
    """`adamw_8bit`: its states in 8 bits by bitsandbytes; `paged_adamw_8bit`: and paged out of a full GPU."""
    lora: LoraConfig | None = None
    """Train low-rank adapters instead of the weights (peft)."""
    packing: bool = False
    """The samples of a batch one after another in one row, instead of a row each padded to the longest. The
    same losses and gradients; pays with attention kernels for packed rows, on a GPU."""
    gradient_checkpointing: bool = False
    """Compute each layer's activations again in the backward pass instead of keeping them."""

    @model_validator(mode="after")
    def _target_is_asked(self) -> TrainConfig:
        if "cross_entropy" in self.loss.names and (self.learnable_share or self.on_policy):
            raise ValueError(
                "learnable_share and on_policy need the target's distribution, which cross_entropy does not "
                "look at: choose another loss or leave them out"
            )
        if self.packing and self.on_policy:
            raise ValueError("on_policy makes batches of a row per prompt: leave packing out")
        return self

    def identity(self) -> dict[str, Any]:
        """What decides the training, for the stage's key: options that are not in use are no part of it."""
        unused: dict[str, Any] = {"loss": {"beta"} if "jsd" not in self.loss.names else set()}
        if self.signal != "topk":
            unused["top_k"] = True
        for name in ("optimizer", "packing", "gradient_checkpointing"):
            if getattr(self, name) == type(self).model_fields[name].default:
                unused[name] = True
        return self.model_dump(mode="json", exclude=unused, exclude_none=True)


@dataclass(frozen=True)
class TrainResult:
    """What training did. The best drafter stands in `directory`."""

    directory: Path
    steps: int
    tokens: int
    """Completion tokens trained on."""
    best_step: int
    """The step whose drafter was kept; 0 is the drafter as it came."""
    best: dict[str, float]
    """Its held-out means: sampled, argmax, greedy."""
    history: list[dict[str, float]]
    """Every held-out check: step, sampled, argmax, greedy."""
    losses: list[dict[str, float]]
    """The training loss on its way: step, loss."""
    clipped_steps: int
    """Steps whose gradient was longer than the limit, and was shortened to it."""
    skipped_steps: int
    """Steps that were left out, for their gradient was not finite."""


def held_out_samples(samples: Samples, metric: Metric, temperature: float, tokens: int) -> Samples:
    """The select split that checks run on: about `tokens` completion tokens, an even spread over the split.

    Acceptance at temperature 0 is that along greedy text, so `greedy` takes samples drawn at 0, the others
    those drawn at `temperature`; where sampling drew none so, all of the split stand in. Raises `UserError`
    when the split is empty.
    """
    select = samples.where(split="select")
    if len(select) == 0:
        raise UserError(
            "There is no sample of the select split to pick the best drafter by; raise data.splits.select."
        )
    drawn = select.where(temperature=0.0 if metric == "greedy" else temperature)
    pool = drawn if len(drawn) else select
    share = min(1.0, max(1, tokens) / max(1, sum(sum(record.completion_mask) for record in pool)))
    kept = {int(number / share) for number in range(max(1, int(len(pool) * share)))}
    return pool.pick(sorted(kept))


def train_drafter(
    drafter: DraftModel,
    target: Target,
    samples: Samples,
    config: TrainConfig,
    *,
    temperature: float,
    seed: int,
    out_dir: Path,
    report: Report,
    metric: Metric = "greedy",
) -> TrainResult:
    """Train `drafter` in place and leave the best one in `out_dir`/drafter; goes on where a killed run
    stopped.

    Args:
        samples: the train and select splits are used; with `signal: hidden` they must carry signals.
        temperature: > 0, divides both models' logits in the loss; cached signals must be of it. seed: of the
        batch plan and every other draw. out_dir: everything that training writes lies in it: `checkpoints/`
        (two newest, removed at the end), `best/`
            and, when done, `drafter/`.
        metric: the held-out acceptance that picks the best drafter, the one of the serving mode.

    The input embedding stays frozen unless it is tied to the head. Master weights are float32; with a
    bfloat16 drafter on a GPU the products run in bfloat16, and the drafter is saved in its own dtype. Raises
    `UserError` for samples without completions or signals, and when training diverges.
    """
    from accelerate import PartialState

    from distill.data_selection import forget_reference, keep_flattest, reference_kl
    from distill.sharding import shards_weights
    from distill.trainer import TrainingRun, run_training

    processes = PartialState(cpu=target.model.device.type == "cpu")
    check_here("none", config.optimizer, has_gpu=processes.device.type != "cpu")
    if config.lora is not None:
        check_peft()
    if len(samples.where(split="train")) == 0:
        raise UserError("There is no sample in the train split, so nothing to train on; sample more.")
    carried = {"topk": samples.has_top_k, "features": samples.has_features}
    there = carried.get(config.signal, samples.has_signals)
    if config.signal != "live" and not there:
        raise UserError(
            f"train.signal is {config.signal} but these samples carry no such signals; set train.signal=live."
        )
    sharded = shards_weights()
    if sharded and config.on_policy is not None:
        raise UserError("train.on_policy drafts with whole weights: leave FSDP out, ACCELERATE=ddp.")
    if config.flat_share is not None:
        samples = keep_flattest(
            samples, target, config.flat_share, batch_size=config.batch_size, temperature=temperature
        )
    train = samples.where(split="train")
    completion_tokens = train.completion_tokens
    if config.tokens > MOST_EPOCHS * completion_tokens:
        raise UserError(
            f"train.tokens = {config.tokens} is more than {MOST_EPOCHS} passes over the {completion_tokens} "
            "tokens of the samples: lower it, or raise sample.tokens."
        )
    reference = None
    if config.learnable_share is not None:
        reference = reference_kl(
            drafter,
            target,
            samples,
            config,
            temperature=temperature,
            seed=seed,
            out_dir=out_dir,
            report=report,
        )
    plan = plan_batches(
        [(len(record.input_ids), record.completion_tokens) for record in train],
        batch_size=config.batch_size,
        tokens=config.tokens,
        accumulation=config.accumulation,
        seed=seed,
    )
    best, drafter_dir = out_dir / "best", out_dir / "drafter"
    if processes.is_main_process and drafter_dir.is_dir() and not best.is_dir():
        # A run that was killed while it tidied up: its last checkpoint may still be there
        drafter_dir.rename(best)
    # A sharded checkpoint is of use to as many processes alone; a whole one to any number
    sharding = [processes.num_processes] if sharded else []
    run = TrainingRun(
        drafter=drafter,
        target=target,
        train=train,
        held_out=held_out_samples(samples, metric, temperature, int(config.tokens * _HELD_OUT_SHARE)),
        plan=plan,
        config=config,
        temperature=temperature,
        seed=seed,
        metric=metric,
        check_steps=check_steps(plan.steps),
        identity=canonical_hash([plan.batches, config.identity(), temperature, seed, metric, *sharding]),
        checkpoints=out_dir / "checkpoints",
        best=best,
        report=report,
        reference=reference,
    )
    history, losses, guards = run_training(run)
    if processes.is_main_process:
        shutil.rmtree(drafter_dir, ignore_errors=True)
        best.rename(drafter_dir)
        shutil.rmtree(run.checkpoints)
        forget_reference(out_dir)
    processes.wait_for_everyone()  # the drafter stands in its place
    kept = best_check(history, metric)
    return TrainResult(
        directory=drafter_dir,
        steps=plan.steps,
        tokens=sum(plan.tokens),
        best_step=int(kept["step"]),
        best={name: value for name, value in kept.items() if name != "step"},
        history=history,
        losses=losses,
        clipped_steps=guards["clipped"],
        skipped_steps=guards["skipped"],
    )


def check_steps(steps: int) -> list[int]:
    """The steps after which held-out acceptance is measured: evenly spaced, the last one included."""
    return sorted({max(1, round(steps * number / _EVALUATIONS)) for number in range(1, _EVALUATIONS + 1)})


def best_check(history: Sequence[dict[str, float]], metric: Metric) -> dict[str, Any]:
    """The check with the highest `metric` (for heads on the target, with most accepted drafts by it); where
    several are equal, by `sampled`, which is finer, then the earliest."""

    def rank(check: dict[str, float]) -> tuple[float, float, float]:
        return check.get(ACCEPTED, check[metric]), check["sampled"], -check["step"]

    return max(history, key=rank)
