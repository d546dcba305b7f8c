"""What a draft step costs before any training, and the acceptance that pays for it.

Speed depends on the shapes of the two models alone, so they are made with random weights and their forwards
timed as the evaluation times them. Depth costs latency, width hardly does.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill.findings import Finding
from distill.model_files import read_config
from distill.recipe import Recipe
from distill.resolve import find_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def estimate(recipe: Recipe, cache_dir: Path) -> Finding:
    """The measured costs of a round at the recipe's batch size, and where each K breaks even, in a sentence.

    Needs the models' configs on this machine: a target that is still to be downloaded or converted is named
    instead, and nothing is loaded.
    """
    target = find_model(recipe.target.model, recipe.target.revision, cache_dir)
    init = recipe.draft.init
    source = target if init.from_ == "target" else find_model(init.from_, recipe.draft.revision, cache_dir)
    for what, path in (("target", target), ("drafter's source", source)):
        if path is None:
            return Finding(
                "note", "cost", f"measured here once the {what} is on this machine: run the recipe once"
            )
    assert target is not None and source is not None
    return Finding("note", "cost", describe(measure(recipe, target, source)))


def measure(recipe: Recipe, target: Path, source: Path) -> dict[str, Any]:
    """The costs of `evaluation.speed.measure_costs` for models of the recipe's shapes, and by K the
    acceptance per token at which drafting neither gains nor loses (None: it cannot gain)."""
    import torch

    from distill.drafter import start_head
    from distill.prune import pruned_config
    from distill.shape import narrow_config
    from evaluation.cost_model import break_even_acceptance, measure_by_batch
    from evaluation.decoder.drafters import DraftModel

    init, counts = recipe.draft.init, recipe.evaluate.num_speculative_tokens
    target_config, config = (read_config(path) for path in (target, source))
    kept = init.layer_count or len(init.layers or range(config.num_hidden_layers))
    config = pruned_config(config, range(kept))
    if init.width is not None:
        config = narrow_config(config, init.width)
    ids = recipe.draft.vocab_size or config.vocab_size
    vocab = None if ids == config.vocab_size else torch.arange(ids)
    dtype, device = getattr(torch, recipe.target.dtype), "cuda" if torch.cuda.is_available() else "cpu"
    model = _random_model(config, ids, dtype, device) if recipe.draft.kind == "model" else None
    whole = _random_model(target_config, target_config.vocab_size, dtype, device)
    drafter = DraftModel(start_head(recipe.draft, whole, vocab) if model is None else model, vocab)
    (costs,) = measure_by_batch(whole, drafter, counts, [recipe.serving.batch_size])
    return {**costs, "break_even": {count: break_even_acceptance(costs, count) for count in counts}}


def describe(costs: Mapping[str, Any]) -> str:
    """The estimate as the user reads it."""
    parts = [
        f"K {count} never pays" if rate is None else f"K {count} from acceptance {rate:.2f} on"
        for count, rate in costs["break_even"].items()
    ]
    drafting = f"a draft step takes {costs['draft_step_ms']:.1f} ms"
    if (first := costs.get("first_draft_step_ms", 0.0)) > 10 * costs["draft_step_ms"]:
        drafting = f"all drafts of a round together take {first:.1f} ms"
    return (
        f"{drafting}, a target step {costs['target_step_ms']:.1f} ms at batch {costs['batch_size']} "
        f"(c = {costs['cost_ratio']:.2f}; random weights of these shapes, timed here); "
        f"pays: {', '.join(parts)}"
    )


def _random_model(config: Any, head_rows: int, dtype: Any, device: str) -> PreTrainedModel:
    import torch

    from distill.models import empty_model

    config.dtype = dtype
    model = empty_model(config, head_rows=head_rows).to(device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)  # memory as it comes may hold denormals, which slow a CPU down
    return model.eval().requires_grad_(False)
