"""Linear layers with weights packed once for oneDNN: the widths of a verify forward (2-16 rows) get several
times faster.

A float32 product of a few rows reads the weights at a third of the memory's speed with torch's default
kernels, because they are packed anew at every call. Packed once, a forward of width 5 costs little more than
one of width 1, which is what makes speculation pay on a CPU. The operators are private to torch, so they are
tried once and left alone where they fail.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import nn

PACKED_ROWS = 8  # the layout is chosen for this many rows and serves every width


def pack(weight: torch.Tensor) -> torch.Tensor:
    """The weight `[out, in]` in oneDNN's own layout (an opaque tensor; a copy of the weight's size)."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), PACKED_ROWS)


def packed_product(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`x [..., in] @ weight.T + bias` with a weight from `pack`."""
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


@cache
def packing_works() -> bool:
    """Whether this torch build has the operators and they agree with `nn.functional.linear`."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(5, 24, generator=generator), torch.randn(40, 24, generator=generator)
    try:
        product = packed_product(x, pack(weight), None)
    except (AttributeError, RuntimeError, TypeError):
        return False
    return torch.allclose(product, nn.functional.linear(x, weight), atol=1e-4)


class PackedLinear(nn.Module):
    """`nn.Linear` with a packed copy of its weight for more than one row; one row reads the plain weight."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.packed = pack(linear.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if (
            x.numel() == x.shape[-1]
        ):  # a matrix-vector product is memory bound either way and needs no packing
            return nn.functional.linear(x, self.weight, self.bias)
        return packed_product(x, self.packed, self.bias)


def pack_linears(model: nn.Module) -> None:
    """Swap every float32 `nn.Linear` for a `PackedLinear`, in place, where this torch build can."""
    if not packing_works():
        return
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and child.weight.dtype == torch.float32:
                setattr(module, name, PackedLinear(child))
