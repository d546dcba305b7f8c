"""Does a recipe fit its models? Asked of their configs alone, before the first token is sampled."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.errors import UserError
from distill.model_files import read_config

if TYPE_CHECKING:
    from distill.recipe import Recipe


def check_compatibility(recipe: Recipe, target: Path, init: Path | None) -> None:
    """Refuse what would otherwise fail hours later: layers, ids and positions that the models do not have.

    `target` and `init` are the models' folders; `init` is None where the drafter is cut out of the target.
    Raises `UserError` with everything that does not fit.
    """
    target_config = _text_config(target)
    source_config = target_config if init is None else _text_config(init)
    problems = [
        *_heads(recipe, target_config),
        *_layers(recipe, source_config.num_hidden_layers),
        *_ids(recipe, target_config.vocab_size),
        *_positions(recipe, "target", getattr(target_config, "max_position_embeddings", None)),
        *_positions(recipe, "drafter", getattr(source_config, "max_position_embeddings", None)),
    ]
    if problems:
        raise UserError("\n".join(dict.fromkeys(problems)))


def _text_config(folder: Path) -> Any:
    return read_config(folder).get_text_config()


def _heads(recipe: Recipe, target: Any) -> list[str]:
    from evaluation.head import scale_and_cap

    if recipe.draft.kind == "model" or scale_and_cap(target) == (1, None):
        return []
    return [
        f"draft.kind: the target scales or caps its logits, which {recipe.draft.kind} heads have no part "
        "for: choose kind model."
    ]


def _layers(recipe: Recipe, depth: int) -> list[str]:
    init = recipe.draft.init
    source = "the target" if init.from_ == "target" else init.from_
    if init.layer_count is not None and init.layer_count > depth:
        return [f"draft.init.layer_count is {init.layer_count}, but {source} has {depth} layers."]
    absent = [layer for layer in init.layers or [] if layer >= depth]
    if not absent:
        return []
    return [f"draft.init.layers names layer {absent[0]}, but {source} has layers 0 to {depth - 1}."]


def _ids(recipe: Recipe, vocab_size: int) -> list[str]:
    wanted = recipe.draft.vocab_size
    if wanted is None or wanted <= vocab_size:
        return []
    return [
        f"draft.vocab_size is {wanted}, but the target has {vocab_size} ids: leave it out for all of them."
    ]


def _positions(recipe: Recipe, what: str, limit: int | None) -> list[str]:
    # A round may draft past the last token wanted, and its first draft step looks at one position more.
    sampled = recipe.sample.max_new_tokens + (recipe.train.on_policy is not None)
    answer = max(sampled, recipe.evaluate.max_new_tokens + recipe.evaluate.widest + 1)
    needed = recipe.data.max_prompt_tokens + answer
    if limit is None or needed <= limit:
        return []
    return [
        f"data.max_prompt_tokens and the answers need {needed} positions, but the {what} has {limit}: lower "
        "data.max_prompt_tokens, sample.max_new_tokens or evaluate.max_new_tokens."
    ]
