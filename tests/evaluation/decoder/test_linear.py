"""8-bit weights multiply what they say, and a drafter that has them changes no output."""

import pytest
import torch
from torch import nn

from evaluation.decoder.drafters import DraftModel, ModelDrafter
from evaluation.decoder.engine import Decoder, Request
from evaluation.decoder.linear import INT8_ROWS, Int8Linear, int8_works, quantize
from evaluation.decoder.runner import Runner
from evaluation.decoder.sampling import SamplingOptions
from tests.evaluation.decoder.tiny_models import VOCAB, llama

pytestmark = pytest.mark.skipif(not int8_works(), reason="this torch build has no 8-bit products on a CPU")


def layer(bias: bool) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(64, 48, bias=bias).requires_grad_(False)


def test_rounding_is_within_half_a_step_and_rows_of_zeros_stay_zero() -> None:
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(1))
    weight[7] = 0
    rounded, scale = quantize(weight)
    step = scale.float()[:, None]
    # The scale itself is rounded to bfloat16, so the largest weight may be clamped by one part in 256.
    allowed = 0.5 * step + weight.abs().amax(dim=1, keepdim=True) / 256
    assert ((rounded.float() * step - weight).abs() <= allowed).all()
    assert (rounded[7] == 0).all() and rounded.abs().amax() == 127


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, INT8_ROWS])
def test_few_rows_multiply_the_rounded_weight(rows: int, bias: bool) -> None:
    linear = layer(bias)
    x = torch.randn(1, rows, 64, generator=torch.Generator().manual_seed(2))
    product = Int8Linear(linear)(x)
    rounded, scale = quantize(linear.weight)
    expected = x.double() @ (rounded.double() * scale.double()[:, None]).T
    expected = expected if linear.bias is None else expected + linear.bias.double()
    assert product.shape == (1, rows, 48) and product.dtype == x.dtype
    assert (product - expected).abs().max() < 0.02 * expected.abs().max()
    shuffled = x.double() @ (rounded.double() * scale.double()[:, None]).roll(1, dims=0).T  # control
    assert (product - shuffled).abs().max() > 0.2 * expected.abs().max()


def test_many_rows_read_the_plain_weight() -> None:
    linear = layer(True)
    x = torch.randn(INT8_ROWS + 1, 64)
    assert torch.equal(Int8Linear(linear)(x), linear(x))
    assert not torch.equal(Int8Linear(linear)(x[:1]), linear(x[:1]))  # control


def test_an_int8_drafter_changes_no_token_and_the_callers_model_keeps_its_layers() -> None:
    target, draft = llama(seed=0), llama(seed=1)
    requests = [Request(list(range(3, 9)), 12), Request([5], 12)]

    def decode(model: object, int8: bool) -> tuple[list[list[int]], int]:
        runner = Runner(target, 2, 64)
        drafter = ModelDrafter(DraftModel(model), runner, SamplingOptions(), int8=int8) if model else None  # type: ignore[arg-type]
        decoder = Decoder(
            runner,
            eos_ids=[VOCAB - 1],
            options=SamplingOptions(),
            drafter=drafter,
            num_speculative_tokens=3 if drafter else 0,
        )
        outputs = decoder.generate(requests)
        return [o.tokens for o in outputs], sum(accepted for o in outputs for _, accepted in o.rounds)

    plain, _ = decode(None, False)
    assert decode(draft, True)[0] == plain
    tokens, accepted = decode(target, True)  # nearly the target itself: most drafts stand
    assert tokens == plain and accepted > 0
    assert not any(isinstance(module, Int8Linear) for module in target.modules())
