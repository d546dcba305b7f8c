"""Linear layers for few rows on a CPU: packed once for oneDNN, or with 8-bit weights.

Packed (any model): a float32 product of a few rows, a verify forward, can cost twice one of a single row with
torch's default kernels, which pack the weights anew at every call. Packed once, it costs little more, and
then speculation pays. How much packing helps depends on the processor (docs/LOG.md); the operators are
private to torch, so they are tried once and left alone where they fail.

8-bit (drafters only): a draft step is bound by reading its weights, and 8-bit weights are a quarter of them.
A drafter's proposals may then differ from those of its own float32 weights; the output never does, for it is
the target's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import nn

PACKED_ROWS = 8  # the layout is chosen for this many rows and serves every width
INT8_ROWS = (
    8  # up to here 8-bit weights win on every processor tried, from 16 rows on they lose (docs/LOG.md)
)


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
    _swap(model, lambda linear: PackedLinear(linear) if linear.out_features >= smallest_packed() else linear)


class Int8Linear(nn.Module):
    """`nn.Linear` with 8-bit weights for up to `INT8_ROWS` rows; more rows (a prompt) read the plain weight.

    Symmetric rounding with one scale per output, `weight ~ int8 * scale`; activations are rounded to
    bfloat16.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.int8, self.scale = quantize(linear.weight.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.numel() // x.shape[-1]
        if rows > INT8_ROWS:
            return nn.functional.linear(x, self.weight, self.bias)
        product = int8_product(x.reshape(rows, -1), self.int8, self.scale).view(*x.shape[:-1], -1)
        return product if self.bias is None else product + self.bias


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight `[out, in]` as int8 `[out, in]` and bfloat16 scales `[out]`."""
    scale = (weight.abs().amax(dim=1) / 127).clamp(min=torch.finfo(torch.float32).tiny).bfloat16()
    # Divided by the rounded scale: what is multiplied back is that one.
    return (weight / scale.float()[:, None]).round().clamp(-127, 127).to(torch.int8), scale


def int8_product(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """`x [rows, in] @ (weight * scale).T` in x's dtype, with a weight and scales from `quantize`."""
    return torch._weight_int8pack_mm(x.bfloat16(), weight, scale).to(x.dtype)


@cache
def int8_works() -> bool:
    """Whether this torch build has the operator and it agrees with the product of the rounded weight."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, 64, generator=generator), torch.randn(48, 64, generator=generator)
    rounded, scale = quantize(weight)
    try:
        product = int8_product(x, rounded, scale)
    except (AttributeError, RuntimeError, TypeError):
        return False
    expected = x @ (rounded.float() * scale.float()[:, None]).T
    return torch.allclose(product, expected, atol=0.02 * float(expected.abs().max()))


def quantize_linears(model: nn.Module) -> None:
    """Swap `nn.Linear`s for `Int8Linear`s, in place, where this build can."""
    if int8_works():
        _swap(model, Int8Linear)


def _swap(model: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> None:
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and child.weight.dtype == torch.float32:
                setattr(module, name, make(child))
