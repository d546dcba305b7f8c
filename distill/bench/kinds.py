"""`distill bench kinds`: drafters of several kinds for one target, trained on the same samples, in one race,
batch size by batch size.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.errors import UserError
from distill.bench.race import Contestant, contestant, race_drafters, race_requests
from distill.context import Run
from distill.identity import environment
from distill.recipe import Recipe
from distill.stages import Say

if TYPE_CHECKING:
    from evaluation.decoder.drafters import DraftModel

BATCH_SIZES = (1, 4, 16)
RATES_BATCH = 16


def bench_kinds(recipes: Sequence[Recipe], runs_dir: Path, say: Say) -> dict[str, Any]:
    """The race of the recipes' trained drafters. `rows` has one entry per batch size, drafter and K.

    Raises `UserError` where one is not trained yet, or not for the same target on the same samples.
    """
    from transformers.utils import logging

    logging.set_verbosity_error()
    with ExitStack() as stack:
        runs = [Run(recipe, runs_dir, say, stack) for recipe in recipes]
        check_comparable(runs)
        first = runs[0]
        for run in runs[1:]:
            run.target = first.target  # loaded once
        names = [run.recipe.name for run in runs]
        contestants = [enter(run, first, alone=names.count(run.recipe.name) == 1) for run in runs]
        requests = race_requests(first)
        rows: list[dict[str, Any]] = []
        for size in [size for size in BATCH_SIZES if size <= len(requests)]:
            say(f"bench: {len(requests)} prompts by batches of {size}")
            rows += race_drafters(first, contestants, requests, size)
        return {
            "target": first.recipe.target.model,
            "samples": len(first.samples.where(split="train")),
            "prompts": len(requests),
            "new_tokens": first.recipe.evaluate.max_new_tokens,
            "serving": first.recipe.serving.model_dump(),
            "environment": environment(),
            "rows": rows,
        }


def check_comparable(runs: Sequence[Run]) -> None:
    """Raise `UserError` unless every run is trained, for one target and on one set of samples, whatever each
    keeps of the target's signals.
    """
    contents: dict[str, Any] = {}
    for run in runs:
        name = f"{run.recipe.name} ({run.recipe.draft.kind})"
        if name in contents:
            raise UserError(f"two of the recipes are called {name}: give one of them another file name.")
        if run.stages["train"].manifest() is None:
            raise UserError(
                f"recipe {name} has no trained drafter here: run `distill train` with it and the same "
                "settings first."
            )
        texts = [(one.prompt_id, one.sample_index, one.temperature, one.input_ids) for one in run.samples]
        contents[name] = (run.stages["sample"].outside["target"], texts, run.recipe.serving)
    first, *others = contents
    for name in others:
        if contents[name] != contents[first]:
            raise UserError(
                f"recipes {first} and {name} differ in their samples or serving mode, so their drafters do "
                "not compare: give both the same seed, target, data, sample and serving sections, and "
                "evaluate.prompts."
            )


def enter(run: Run, first: Run, *, alone: bool) -> Contestant:
    """A recipe's trained drafter, under the recipe's name, with its kind where that name is not `alone`."""
    import json

    from distill.models import load_drafter

    stage = run.stages["train"]
    manifest = stage.manifest()
    assert manifest is not None
    training = json.loads((stage.directory / "training.json").read_text(encoding="utf-8"))
    drafter = load_drafter(stage.directory / "drafter", run.device)
    return contestant(
        run.recipe.name if alone else f"{run.recipe.name} ({run.recipe.draft.kind})",
        drafter,
        first.target.model,
        counts=run.recipe.evaluate.num_speculative_tokens,
        minutes=None if manifest.get("resumed") else manifest["seconds"] / 60,
        trained_tokens=training["tokens"],
        rates=static_rates(run, drafter),
    )


def static_rates(run: Run, drafter: DraftModel) -> list[list[float]] | None:
    """What shapes Medusa's tree; None for the other kinds, whose trees follow their own confidence."""
    from evaluation.acceptance import rank_rates
    from evaluation.decoder.kinds import kind_of
    from evaluation.signals import target_signals

    if kind_of(drafter.model.config) != "medusa":
        return None
    temperature = run.recipe.serving.temperature
    return rank_rates(
        drafter,
        run.target.model,
        run.samples.where(split="select"),
        2 * max(run.recipe.evaluate.num_speculative_tokens),
        temperature=temperature,
        batch_size=RATES_BATCH,
        signals=partial(target_signals, run.target.model, temperature=temperature or 1.0),
    )
