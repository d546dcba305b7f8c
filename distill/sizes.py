"""What a run needs, in bytes, from the sizes of its models: the headers of local weights say them, or, where
the models are not on this machine, the recipe's `estimate` section.
"""

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path

from data.files import user_path
from distill.identity import model_form
from distill.quantize import BYTES
from distill.recipe import Recipe

GIB = 1 << 30
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
TRAINING_BYTES = 16
"""Bytes per trained parameter: float32 weight, gradient and AdamW's two moments."""


@dataclass(frozen=True)
class Sizes:
    """Parameters of the two models and the width of their hidden states."""

    target: int
    draft: int
    hidden: int
    draft_hidden: int


def sizes_of(recipe: Recipe) -> Sizes | None:
    """From local weights where both models are here, else from the recipe's estimate."""
    target = measured(recipe.target.model)
    if target is not None and recipe.draft.kind == "model":
        init = recipe.draft.init
        if init.from_ == "target":
            kept = (init.layer_count or len(init.layers or [])) / max(1, target["layers"])
            draft_parameters, hidden = math.ceil(target["parameters"] * kept), target["hidden"]
            return Sizes(target["parameters"], draft_parameters, hidden, hidden)
        draft = measured(init.from_)
        if draft is not None:
            return Sizes(target["parameters"], draft["parameters"], target["hidden"], draft["hidden"])
    estimate = recipe.estimate
    if estimate is None:
        return None
    hidden = estimate.target_hidden_size
    own = estimate.draft_hidden_size or hidden
    return Sizes(estimate.target_parameters, estimate.draft_parameters, hidden, own)


def measured(model: str) -> dict[str, int] | None:
    """Parameters, hidden size and layers of a local model folder, from its headers; None where there is
    none.
    """
    path = user_path(model)
    if model_form(model) != "local" or not path.is_dir():
        return None
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        parameters = sum(_parameters(file) for file in path.glob("*.safetensors"))
        return {
            "parameters": parameters,
            "hidden": config["hidden_size"],
            "layers": config["num_hidden_layers"],
        }
    except (OSError, ValueError, LookupError, TypeError, AttributeError, struct.error):
        return None  # another check says what is wrong with the folder


def _parameters(file: Path) -> int:
    # A safetensors file begins with the length of its JSON header, 8 bytes little-endian.
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(min(length, 100_000_000)))
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")


def memory_needed(recipe: Recipe, sizes: Sizes) -> int:
    """Bytes at the peak of sampling or training, estimated for a Llama: parameters P = 12 layers hidden^2.

    A cached token takes 2 layers * hidden / 4 numbers (a quarter of the heads are key-value heads), thus
    P / (24 hidden); a trained one keeps some 34 layers * hidden, thus about 3 P / hidden. The mean text is
    half as long as the longest.
    """
    width = DTYPE_BYTES[recipe.target.dtype]
    longest = recipe.data.max_prompt_tokens + recipe.sample.max_new_tokens
    cache = recipe.sample.batch_size * longest * sizes.target * width // (24 * sizes.hidden)
    target = int(sizes.target * BYTES.get(recipe.target.quantization, width))
    sampling = target + cache
    activations = recipe.train.batch_size * longest // 2 * 3 * sizes.draft * width // sizes.draft_hidden
    training = target + sizes.draft * TRAINING_BYTES + activations
    return (
        int(1.1 * max(sampling, training)) + GIB
    )  # a tenth for what is left out, and the libraries themselves


def disk_needed(recipe: Recipe, sizes: Sizes) -> int:
    """Bytes that a run writes: the target's signals, and the drafter with its checkpoints."""
    width = DTYPE_BYTES[recipe.target.dtype]
    positions = 1 + recipe.data.max_prompt_tokens / recipe.sample.max_new_tokens
    # A hidden state, a float32 log-normaliser and an int64 argmax; or ids, probabilities and the tail's mass
    per_token = {
        "hidden": sizes.hidden * width + 12,
        "hidden_half": sizes.hidden * 2 + 12,
        # and three states of every position, of which prompts have some
        "features": sizes.hidden * width + 12 + 3 * sizes.hidden * width * positions,
        "topk": recipe.train.top_k * 8 + 4,
        "live": 0,
    }
    signals = int(recipe.sample.tokens * per_token[recipe.train.signal])
    # The drafter stands in training, in MLflow and in the export, beside two checkpoints with optimizer
    # state.
    drafters = sizes.draft * (3 * width + 2 * 3 * 4)
    return signals + drafters + GIB // 4


def size_text(count: int) -> str:
    """Bytes as the user reads them."""
    return f"{count / GIB:.1f} GiB" if count >= GIB // 10 else f"{count / (1 << 20):.1f} MiB"
