"""The kinds of drafters: what a config or weights are, and the decoder's part for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from data.errors import UserError
from evaluation.decoder.drafters import DraftModel, ModelDrafter
from evaluation.decoder.eagle import LAYERS, EagleDrafter, EagleModel
from evaluation.decoder.heads import HeadModel
from evaluation.decoder.medusa import MedusaConfig, MedusaDrafter, MedusaModel
from evaluation.decoder.runner import Runner
from evaluation.decoder.sampling import SamplingOptions
from evaluation.decoder.tree_drafter import TreeDrafter

Kind = Literal["model", "medusa", "eagle"]


def kind_of(config: Any) -> Kind:
    """The kind of a drafter with this config."""
    if isinstance(config, MedusaConfig):
        return "medusa"
    public = any("Eagle3" in name for name in getattr(config, "architectures", None) or ())
    return "eagle" if public or getattr(config, LAYERS, None) else "model"


def head_model(config: Any) -> HeadModel:
    """A drafter of a kind that is a head on the target, with the weights of its modules' own start."""
    if isinstance(config, MedusaConfig):
        return MedusaModel(config)
    if getattr(config, LAYERS, None) is None:
        raise UserError(
            f"The EAGLE drafter's config.json lacks {LAYERS}: name the target's three layers there."
        )
    return EagleModel(config)


def own_weights(draft: DraftModel, target: PreTrainedModel) -> list[Tensor]:
    """The weights that a drafter adds to its target's: all but embeddings that are the target's own."""
    theirs = target.get_input_embeddings().weight
    return [
        weight
        for weight in draft.model.parameters()
        if weight.shape != theirs.shape or not torch.equal(weight, theirs)
    ]


def make_drafter(
    draft: DraftModel, target: Runner, options: SamplingOptions, **settings: Any
) -> ModelDrafter:
    """The decoder's drafter of its kind, of chains; `settings` as `ModelDrafter` takes them."""
    kinds = {"model": ModelDrafter, "medusa": MedusaDrafter, "eagle": EagleDrafter}
    return kinds[kind_of(draft.model.config)](draft, target, options, **settings)


def make_tree_drafter(
    draft: DraftModel,
    target: Runner,
    options: SamplingOptions,
    prices: Sequence[float],
    rates: Sequence[Sequence[float]] | None = None,
    **settings: Any,
) -> TreeDrafter:
    """The same for trees, which `TreeDrafter` grows with `prices` and `rates`."""
    return TreeDrafter(make_drafter(draft, target, options, argmax=True, **settings), prices, rates)
