"""What the settings of a recipe have to do with each other: checks over several of its sections."""

import re
from collections.abc import Callable, Iterator

from data.sample import SampleConfig
from distill.drafter import DraftConfig, InitConfig
from distill.export import FORMATS_OF_KIND, ExportConfig
from distill.identity import model_form
from distill.models import TargetConfig
from distill.train import TrainConfig
from evaluation.evaluate import EvaluateConfig, ServingConfig

GROUPS_AT_LEAST = 5
"""Prompts that fill a batch are one measurement of speed: of fewer than these an interval says nothing, and
of a single one it would have no width."""
COMMIT = re.compile(r"[0-9a-f]{40}")


def _check_target_revision(target: TargetConfig) -> Iterator[tuple[str, str]]:
    yield from _check_revision("target.revision", target.model, target.revision)


def _check_init(draft: DraftConfig) -> Iterator[tuple[str, str]]:
    init = draft.init
    if draft.kind != "model":
        if init != InitConfig() or draft.revision is not None:
            yield "draft.init", f"{draft.kind} heads start from the target's own weights: leave init out"
        return
    if init.layers is not None and init.layer_count is not None:
        yield "draft.init.layer_count", "give the layers or their number, not both"
    if init.from_ == "target" and not init.layers and init.layer_count is None:
        yield "draft.init.layers", "give the target's layers to keep, such as [0, 1, 28, 29], or layer_count"
    if init.layers is not None and sorted(set(init.layers)) != init.layers:
        yield "draft.init.layers", "list each layer once, in ascending order"
    if init.from_ == "target":
        if draft.revision is not None:
            yield "draft.revision", "the drafter is made from the target: leave revision out"
    else:
        yield from _check_revision("draft.revision", init.from_, draft.revision)
    if model_form(init.from_) in ("candidate", "shipped"):
        for option in ("layers", "layer_count", "width"):
            if getattr(init, option) is not None:
                yield (
                    f"draft.init.{option}",
                    f"a distilled drafter keeps its own shape: set draft.init.{option} to null",
                )


def _check_kind(
    draft: DraftConfig, train: TrainConfig, evaluate: EvaluateConfig
) -> Iterator[tuple[str, str]]:
    for key, kind in (("heads", "medusa"), ("rollout_steps", "eagle")):
        value = getattr(draft, key)
        if draft.kind == kind and value is None:
            yield f"draft.{key}", f"kind {kind} needs it: give the number of tokens, such as 4"
        elif draft.kind != kind and value is not None:
            yield f"draft.{key}", f"only kind {kind} has it, and this is kind {draft.kind}: leave it out"
    if draft.shared_head and draft.kind != "medusa":
        yield "draft.shared_head", f"only kind medusa has it, and this is kind {draft.kind}: leave it out"
    if train.signal == "features" and draft.kind != "eagle":
        yield (
            "train.signal",
            f"only kind eagle reads other layers, and this is kind {draft.kind}: write hidden",
        )
    most = max(evaluate.num_speculative_tokens)
    if draft.kind == "medusa" and draft.heads is not None and most > draft.heads:
        yield (
            "evaluate.num_speculative_tokens",
            f"{most} drafts need as many Medusa heads, and draft.heads is {draft.heads}",
        )
    if draft.kind != "model":
        if train.signal == "topk":
            yield "train.signal", f"{draft.kind} heads learn from the target's states: write hidden or live"
        for key in ("lora", "packing", "gradient_checkpointing", "learnable_share", "on_policy"):
            if getattr(train, key):
                yield (
                    f"train.{key}",
                    f"not for {draft.kind} heads, only for drafters of kind model: leave it out",
                )


def _check_formats(draft: DraftConfig, export: ExportConfig) -> Iterator[tuple[str, str]]:
    for name in export.formats:
        if name not in FORMATS_OF_KIND[draft.kind]:
            fitting = " or ".join(FORMATS_OF_KIND[draft.kind])
            yield "export.formats", f"a drafter of kind {draft.kind} is exported as {fitting}, not as {name}"


def _check_revision(path: str, model: str, revision: str | None) -> Iterator[tuple[str, str]]:
    if model_form(model) == "hub":
        if revision is None or not COMMIT.fullmatch(revision):
            yield (
                path,
                f"{model} is no folder here, so a hub model: give the 40 hex digits of the commit to use",
            )
    elif revision is not None:
        yield path, f"{model} does not come from a hub: set revision to null"


def _check_temperatures(sample: SampleConfig, serving: ServingConfig) -> Iterator[tuple[str, str]]:
    if serving.temperature not in sample.temperature:
        yield (
            "sample.temperature",
            f"must hold serving.temperature ({serving.temperature:g}): acceptance is measured at it",
        )


def _check_signal(sample: SampleConfig, train: TrainConfig) -> Iterator[tuple[str, str]]:
    if sample.engine != "builtin" and train.signal != "live":
        yield (
            "train.signal",
            f"engine {sample.engine} tells tokens alone, not the target's hidden states: write signal: live",
        )


def _check_loss_temperature(train: TrainConfig, serving: ServingConfig) -> Iterator[tuple[str, str]]:
    kept = serving.temperature or 1.0
    if train.signal != "live" and train.temperature not in (None, kept):
        yield (
            "train.temperature",
            f"kept signals are of temperature {kept:g}, that of serving: write signal: live for another, or "
            "leave it out",
        )


def _check_groups(serving: ServingConfig, evaluate: EvaluateConfig) -> Iterator[tuple[str, str]]:
    needed = GROUPS_AT_LEAST * serving.batch_size
    if serving.batch_size > 1 and evaluate.prompts < needed:
        yield (
            "evaluate.prompts",
            f"{evaluate.prompts} prompts make too few batches of serving.batch_size {serving.batch_size} for "
            f"an interval of the speedup: give {needed} or more",
        )


def _check_sampling_drafter(sample: SampleConfig) -> Iterator[tuple[str, str]]:
    if sample.drafter is not None and model_form(sample.drafter) not in ("candidate", "shipped", "local"):
        yield "sample.drafter", "give models:/NAME@ALIAS, shipped:NAME or a folder with a drafter"


CROSS_CHECKS: tuple[Callable[..., Iterator[tuple[str, str]]], ...] = (
    _check_target_revision,
    _check_init,
    _check_kind,
    _check_formats,
    _check_temperatures,
    _check_signal,
    _check_loss_temperature,
    _check_groups,
    _check_sampling_drafter,
)
"""Checks over several settings. A check runs when the sections that its parameters name are valid by
themselves.
"""
