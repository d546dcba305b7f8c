"""Low-rank adapters for the drafter (LoRA, Hu et al. 2021, arXiv 2106.09685), through peft.

They train in place of the layers' own weights, which stay as they came; a saved drafter holds the sum, so
nothing that comes after training knows of them.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from data.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

_ADAPTER = "default"


class LoraConfig(BaseModel):
    """Adapters on every linear layer but the head: W + alpha / rank * B A, B and A of that rank."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rank: int = Field(default=16, gt=0)
    alpha: float = Field(default=32.0, gt=0)


def check_peft() -> None:
    """Raise `UserError` where peft is not installed."""
    if importlib.util.find_spec("peft") is None:
        raise UserError(
            "train.lora needs the package peft: `pip install -e '.[lora]'`, or leave train.lora out"
        )


def add_lora(model: PreTrainedModel, config: LoraConfig, seed: int) -> None:
    """Put adapters into `model`, in place, and let nothing else train. At first they add zero."""
    check_peft()
    import peft
    import torch

    wanted = peft.LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules="all-linear")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(wanted, model, adapter_name=_ADAPTER)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)


def merged(weights: dict[str, Tensor], config: LoraConfig) -> dict[str, Tensor]:
    """The weights of a model with adapters as those of one without: W + alpha / rank * B A."""
    found = {}
    for name, value in weights.items():
        stem, base, rest = name.partition(".base_layer.")
        if ".lora_" in name:
            continue
        if base and rest == "weight":
            low, high = (weights[f"{stem}.lora_{part}.{_ADAPTER}.weight"] for part in "AB")
            value = value + config.alpha / config.rank * (high @ low)
        found[f"{stem}.{rest}" if base else name] = value
    return found


def remove_lora(model: PreTrainedModel, config: LoraConfig) -> None:
    """Take the adapters out again, in place, their sum added to the layers' weights."""
    weights = merged(model.state_dict(), config)
    for name, module in list(model.named_modules()):
        if hasattr(module, "base_layer"):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, module.base_layer)
    model.load_state_dict(weights)
