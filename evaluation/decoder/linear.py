"""Linear layers with weights packed once for oneDNN, where that speeds up a verify forward (2-16 rows).

A float32 product of a few rows can cost twice one of a single row with torch's default kernels, which pack
the weights anew at every call. Packed once, it costs little more, and then speculation pays. How much packing
helps depends on the processor (docs/LOG.md); the operators are private to torch, so they are tried once and
left alone where they fail.
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


def smallest_packed() -> int:
    """Outputs from which on a layer is packed: a rule of the processor, so one machine gives the same bits.

    With AVX-512 torch's default product is the faster one for all but an output head; with AVX2 packing wins
    everywhere.
    """
    return 4096 if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else 1


def pack_linears(model: nn.Module) -> None:
    """Swap float32 `nn.Linear`s for `PackedLinear`s, in place, where this build and processor gain."""
    if not packing_works():
        return
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if not isinstance(child, nn.Linear) or child.weight.dtype != torch.float32:
                continue
            if child.out_features >= smallest_packed():
                setattr(module, name, PackedLinear(child))
