"""A drafter small enough to ship: 8-bit layers and head, the embeddings left to the target.

`recipes/drafters/NAME/` holds one, and a recipe starts from it as `shipped:NAME`. Of a drafter pruned from
the target most bytes are the target's own embeddings, which whoever distils has anyway; of the rest a linear
layer is int8 with one bfloat16 scale per output, as the decoder runs it on a CPU
(`evaluation.decoder.linear`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from data.errors import UserError
from data.files import write_json
from distill.model_files import read_config, read_weights
from distill.models import Target, empty_model, read_vocab

if TYPE_CHECKING:
    import torch

    from evaluation.decoder.drafters import DraftModel

COMPACT = "compact.json"
"""What makes a folder a compact drafter: a probe of the target's embeddings."""
_WEIGHTS = "drafter.safetensors"
_EMBEDDING = "model.embed_tokens.weight"
_PROBED = 16  # ids, spread over the vocabulary
_TOLERANCE = 1e-2  # of a probe's largest value: the same embeddings in another dtype pass, other ones do not


def write_compact(drafter: DraftModel, folder: Path) -> None:
    """Write `drafter`, whose embeddings are the target's, into `folder`.

    Raises `UserError` where it has a full vocabulary: such a drafter is a model of its own.
    """
    from safetensors.torch import save_file

    from evaluation.decoder.linear import quantize

    if drafter.vocab is None:
        raise UserError(
            "A compact drafter has a reduced draft vocabulary (draft.vocab_size); this one has none."
        )
    tensors: dict[str, torch.Tensor] = {"draft_vocab": drafter.vocab.cpu()}
    for name, value in drafter.model.state_dict().items():
        if name == _EMBEDDING:
            continue
        if value.dim() == 2:
            tensors[f"{name}.int8"], tensors[f"{name}.scale"] = quantize(value.float())
        else:
            tensors[name] = value.float()
    save_file(tensors, folder / _WEIGHTS)
    drafter.model.config.save_pretrained(folder)
    probe = _probe(drafter.model.get_input_embeddings().weight.detach())
    write_json(folder / COMPACT, {"embedding_probe": probe.tolist()})


def check_embeddings(drafter: DraftModel, target_dir: Path) -> None:
    """Raise `UserError` unless the drafter's embeddings are those of the target in `target_dir`: a narrower
    drafter, or one of another model, has its own, which a compact one would lose.
    """
    from safetensors import safe_open

    own = drafter.model.get_input_embeddings().weight.detach()
    for file in sorted(target_dir.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            if _EMBEDDING in tensors.keys():
                theirs = tensors.get_tensor(_EMBEDDING)
                if theirs.shape == own.shape and _same(_probe(theirs), _probe(own)):
                    return
    raise UserError(
        "A compact drafter leaves its embeddings to the target, and this one has its own, as narrower "
        "drafters and those of another model have: export it with --format hf."
    )


def read_compact(directory: Path, target: Target) -> DraftModel:
    """The drafter in `directory`, with the target's embeddings (a copy), in the target's dtype.

    Raises `UserError` where it was made for a target with other embeddings.
    """
    import torch

    from evaluation.decoder.drafters import DraftModel

    config = read_config(directory)
    embedding = target.model.get_input_embeddings().weight.detach()
    expected = torch.tensor(json.loads((directory / COMPACT).read_text())["embedding_probe"])
    same_shape = embedding.shape == (config.vocab_size, config.hidden_size)
    if not same_shape or not _same(_probe(embedding), expected):
        raise UserError(
            f"The drafter in {directory} has the embeddings of another target than {target.name}, "
            "so it cannot draft for this one: start from the target instead (draft.init.from: target)."
        )
    tensors = read_weights(directory / _WEIGHTS)
    vocab = read_vocab(tensors.pop("draft_vocab").tolist(), config.vocab_size, directory / _WEIGHTS)
    weights = {_EMBEDDING: embedding.float()}
    for name, value in tensors.items():
        if name.endswith(".int8"):
            layer = name.removesuffix(".int8")
            weights[layer] = value.float() * tensors[f"{layer}.scale"].float()[:, None]
        elif not name.endswith(".scale"):
            weights[name] = value
    model = empty_model(config, head_rows=len(vocab))
    model.load_state_dict(weights)
    return DraftModel(model.eval().to(target.model.device), vocab.to(target.model.device))


def _same(probe: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((probe - expected).abs().max() <= _TOLERANCE * expected.abs().max())


def _probe(embedding: torch.Tensor) -> torch.Tensor:
    """The first value of a few rows of an embedding [V, H]: float32 [_PROBED]."""
    import torch

    at = torch.linspace(0, len(embedding) - 1, _PROBED, dtype=torch.float64).long()
    return embedding[at.to(embedding.device), 0].float().cpu()
