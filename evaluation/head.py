"""A model's output head, and what the model does to the logits behind it.

Shape legend: n, N rows of hidden states; H their width; V ids of the head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel


BLOCK_ELEMENTS = 1 << 24
"""Of one block of logits, 64 MiB in float32: a whole text's would not fit beside a model."""


@dataclass(frozen=True)
class Head:
    """An output head, and what its model does to the logits:

        cap tanh(scale (hidden @ weight.T + bias) / cap)

    Padding ids are left out by slicing, `Head(weight[:real])`, for both models.
    """

    weight_VH: Tensor
    bias_V: Tensor | None = None
    scale: float = 1.0
    soft_cap: float | None = None

    def __len__(self) -> int:
        return len(self.weight_VH)

    def parts(self) -> list[Tensor]:
        """Its tensors."""
        return [self.weight_VH] if self.bias_V is None else [self.weight_VH, self.bias_V]

    @property
    def plain(self) -> bool:
        """Are the logits `hidden @ weight.T` and nothing else?"""
        return self.bias_V is None and self.scale == 1 and self.soft_cap is None

    def logits(self, hidden_nH: Tensor, work_dtype: torch.dtype = torch.float32) -> Tensor:
        """[n, V] in `work_dtype`, the product in the dtype of what is given."""
        logits_nV = (hidden_nH @ self.weight_VH.to(hidden_nH.dtype).T).to(work_dtype)
        if self.bias_V is not None:
            logits_nV += self.bias_V.to(work_dtype)
        return self.shaped(logits_nV)

    def shaped(self, product_nV: Tensor) -> Tensor:
        """Scale and cap, in place, of `hidden @ weight.T + bias`."""
        if self.scale != 1:
            product_nV *= self.scale
        if self.soft_cap is not None:
            product_nV.div_(self.soft_cap).tanh_().mul_(self.soft_cap)
        return product_nV

    def slope(self, logits_nV: Tensor) -> Tensor | float:
        """What a gradient in the logits is multiplied with to be one in `hidden @ weight.T + bias`."""
        if self.soft_cap is None:
            return self.scale
        return (logits_nV / self.soft_cap).square_().neg_().add_(1).mul_(self.scale)

    def rows(self, ids: Tensor | None) -> Head:
        """The head of those ids (int64) alone; all of them where None."""
        if ids is None:
            return self
        ids = ids.to(self.weight_VH.device)
        return replace(
            self, weight_VH=self.weight_VH[ids], bias_V=None if self.bias_V is None else self.bias_V[ids]
        )

    def to(self, device: torch.device | str) -> Head:
        """The same on a device."""
        bias_V = None if self.bias_V is None else self.bias_V.to(device)
        return replace(self, weight_VH=self.weight_VH.to(device), bias_V=bias_V)

    def detached(self) -> Head:
        """The same without gradients."""
        bias_V = None if self.bias_V is None else self.bias_V.detach()
        return replace(self, weight_VH=self.weight_VH.detach(), bias_V=bias_V)


def head_of(model: PreTrainedModel) -> Head:
    """The head of a causal LM with the model's own parameters, and scale and cap as its config has them.

    Cohere multiplies logits (`logit_scale`), Granite divides them (`logits_scaling`), Gemma caps them
    (`final_logit_softcapping`); Phi's head has a bias. `distill.models.check_head` compares it with what a
    model really does.
    """
    module = model.get_output_embeddings()
    return Head(module.weight, getattr(module, "bias", None), *scale_and_cap(model.config.get_text_config()))


def scale_and_cap(config: Any) -> tuple[float, float | None]:
    """What a text model's config says of its logits."""
    scale = float(getattr(config, "logit_scale", None) or 1) / (getattr(config, "logits_scaling", None) or 1)
    return scale, getattr(config, "final_logit_softcapping", None)


def as_head(head: Head | Tensor) -> Head:
    """A head, also of one that is given by its weight alone."""
    return head if isinstance(head, Head) else Head(head)


def row_blocks(rows: int, ids: int) -> Iterator[slice]:
    """Slices of `rows` rows, so short that the logits of one over `ids` ids have `BLOCK_ELEMENTS` at most."""
    size = max(1, BLOCK_ELEMENTS // ids)
    return (slice(start, start + size) for start in range(0, rows, size))
