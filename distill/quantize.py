"""bitsandbytes, where a recipe asks for it: a target with rounded weights, 8-bit optimizer states.

It is imported only then. A target is rounded as it is loaded; its embeddings and its head keep their dtype,
so signals, losses and acceptance multiply with the same head rows as ever.
"""

from __future__ import annotations

import importlib.util
import logging
from typing import TYPE_CHECKING, Any, Literal

from data.errors import UserError

if TYPE_CHECKING:
    import torch

Quantization = Literal["none", "nf4", "int8"]
Optimizer = Literal["adamw", "adamw_8bit", "paged_adamw_8bit"]

BYTES = {"nf4": 0.57, "int8": 1.0}
"""Per weight of a layer: nf4 keeps a float32 scale for every 64 weights, int8 one per row."""
TRAINER_NAMES = {
    "adamw": "adamw_torch_fused",
    "adamw_8bit": "adamw_8bit",
    "paged_adamw_8bit": "paged_adamw_8bit",
}
"""The optimizers as transformers' trainer calls them."""


def missing(quantization: Quantization, optimizer: Optimizer, has_gpu: bool) -> str | None:
    """Why these settings cannot work on this machine, in a sentence; None where they can.

    bitsandbytes 0.50 rounds weights and optimizer states on a CPU too, but pages of optimizer states need a
    GPU's unified memory.
    """
    if quantization == "none" and optimizer == "adamw":
        return None
    setting = (
        f"target.quantization={quantization}" if quantization != "none" else f"train.optimizer={optimizer}"
    )
    if importlib.util.find_spec("bitsandbytes") is None:
        return f"{setting} needs the package bitsandbytes, which is not installed: `pip install bitsandbytes`"
    if optimizer == "paged_adamw_8bit" and not has_gpu:
        return (
            "train.optimizer=paged_adamw_8bit pages to and from a GPU, and this machine has none: adamw_8bit"
        )
    return None


def check_here(quantization: Quantization, optimizer: Optimizer, has_gpu: bool) -> None:
    """Raise `UserError` where these settings cannot work on this machine."""
    reason = missing(quantization, optimizer, has_gpu)
    if reason is not None:
        raise UserError(reason)


def loading_options(
    quantization: Quantization, dtype: torch.dtype, device: torch.device | str
) -> dict[str, Any]:
    """What transformers needs to load a model rounded, onto `device`."""
    if quantization == "none":
        return {}
    import torch
    from transformers import BitsAndBytesConfig

    if str(device) == "cuda":  # without a number the loader takes the first one, whichever is this process's
        device = f"cuda:{torch.cuda.current_device()}"

    if quantization == "nf4":
        config = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
        )
    else:
        config = BitsAndBytesConfig(load_in_8bit=True)
        # It would tell of its float16 products at every one of them
        logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    return {"quantization_config": config, "device_map": {"": device}}
