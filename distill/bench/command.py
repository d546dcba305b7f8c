"""`distill bench decoder`: models and prompts from a recipe, all comparisons in one run, one table."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from data.errors import UserError
from distill.context import Run
from distill.identity import environment
from distill.recipe import Recipe
from distill.stages import Say

PROMPTS = 16
NEW_TOKENS = 32


def bench(recipe: Recipe, runs_dir: Path, say: Say) -> dict[str, Any]:
    """Every comparison on the recipe's target, trained drafter and first test prompts.

    Raises `UserError` where the drafter is not trained yet. Where llama.cpp is not installed its part is the
    reason why.
    """
    from transformers.utils import logging

    from distill.bench.decoder import Bench, batched, single
    from distill.bench.llama_cpp import beside_llama_cpp
    from distill.export.hf import expand_vocabulary
    from distill.models import load_drafter

    logging.set_verbosity_error()  # transformers warns of the missing end of sequence at every call
    if recipe.draft.kind != "model":
        raise UserError(
            f"recipe {recipe.name} trains heads on the target, and peers assist with models: "
            "choose a recipe of kind model, or compare kinds with `distill bench kinds`."
        )
    with ExitStack() as stack:
        run = Run(recipe, runs_dir, say, stack)
        trained = run.stages["train"]
        if trained.manifest() is None:
            raise UserError(
                f"recipe {recipe.name} has no trained drafter here: run `distill train {recipe.name}` first."
            )
        weights = trained.directory / "drafter"
        drafter, served = load_drafter(weights, run.device), load_drafter(weights, "cpu")
        prompts = [ids for prompt, ids in run.prompts if prompt.split == "test" and prompt.seen_template]
        if len(prompts) < PROMPTS:
            raise UserError(
                f"recipe {recipe.name} has {len(prompts)} test prompts of known templates, and the bench "
                f"takes {PROMPTS}: raise data.splits.test, or add prompts."
            )
        rows = run.target.model.config.vocab_size
        expand_vocabulary(served, rows, list(run.target.eos_ids), prompts[-PROMPTS:])
        served.model.to(run.device)
        plan = Bench(
            target=run.target.model,
            drafter=drafter,
            served_drafter=served.model,
            prompts=prompts[:PROMPTS],
            new_tokens=NEW_TOKENS,
            num_speculative_tokens=max(recipe.evaluate.num_speculative_tokens),
            seed=recipe.seed,
            eos_ids=run.target.eos_ids,
        )
        found: dict[str, Any] = {
            "recipe": recipe.name,
            "prompts": len(plan.prompts),
            "new_tokens": plan.new_tokens,
            "num_speculative_tokens": plan.num_speculative_tokens,
            "environment": environment(),
            "single": single(plan, say),
            "batched": batched(plan, say),
        }
        try:
            found["llama_cpp"] = beside_llama_cpp(plan, weights, run.target_folder, say)
        except UserError as error:
            found["llama_cpp"] = {"missing": str(error)}
    return found


def report(found: dict[str, Any]) -> str:
    """The findings as the user reads them."""
    lines = [
        f"{found['prompts']} prompts of {found['recipe']}, {found['new_tokens']} tokens each, "
        f"K {found['num_speculative_tokens']}, on {found['environment']['cpu']}, "
        f"commit {found['environment']['commit']}"
    ]
    for part, title in (("single", "batch 1"), ("batched", "batch 16"), ("llama_cpp", "beside llama.cpp")):
        lines.append(f"{title}:")
        for name, value in found[part].items():
            lines += _lines(name, value)
    return "\n".join(lines)


def _lines(name: str, value: Any) -> list[str]:
    if isinstance(value, dict) and {"mean", "low", "high"} <= set(value):
        return [f"  {name}: {value['mean']:.2f} [{value['low']:.2f}, {value['high']:.2f}]"]
    if isinstance(value, dict):
        shown = ", ".join(
            f"{key} {_number(each)}" for key, each in value.items() if not isinstance(each, dict)
        )
        return [f"  {name}: {shown}"]
    return [f"  {name}: {_number(value)}"]


def _number(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
