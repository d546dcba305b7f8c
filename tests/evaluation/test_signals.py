"""What is lost where hidden states are kept in half, or as top-k: within the bounds that are stated."""

import pytest
import torch
from torch import Tensor

from data.errors import UserError
from data.signals import Signals
from evaluation.signals import half_bound, in_half, top_k_of

N, H, V = 12, 24, 60


@pytest.fixture(params=[0, 1, 2])
def case(request: pytest.FixtureRequest) -> tuple[Signals, Tensor]:
    generator = torch.Generator().manual_seed(request.param)
    hidden = torch.randn(N, H, generator=generator) * 10.0 ** (request.param - 1)
    hidden[0, :3] = torch.tensor([1e-9, -3e-7, 0.0])  # subnormal in float16
    head = torch.randn(V, H, generator=generator) / 5
    logits = hidden @ head.T / 0.7
    return Signals(hidden, logits.logsumexp(-1), logits.argmax(-1)), head


def test_half_moves_log_probabilities_within_the_bound(case: tuple[Signals, Tensor]) -> None:
    signals, head = case
    half = in_half(signals)
    assert half.hidden.dtype == torch.float16 and torch.equal(half.logsumexp, signals.logsumexp)
    exact, stored = (each.hidden.double() @ head.double().T / 0.7 for each in (signals, half))
    moved = (exact - stored).abs().amax(-1)
    bound = half_bound(signals.hidden.double(), head.double(), 0.7)
    assert (moved <= bound).all() and (moved > 0.01 * bound).all()  # it holds, and says something

    draft = torch.randn(N, V, generator=torch.Generator().manual_seed(9), dtype=torch.float64).softmax(-1)
    accepted, approximately = (
        torch.minimum((logits - exact.logsumexp(-1, keepdim=True)).exp(), draft).sum(-1)
        for logits in (exact, stored)
    )
    assert ((approximately / accepted).log().abs() <= bound).all()


def test_states_that_float16_cannot_hold_are_refused() -> None:
    large = Signals(torch.full((1, 2), 7e4), torch.zeros(1), torch.zeros(1, dtype=torch.int64))
    with pytest.raises(UserError, match="too large for float16"):
        in_half(large)


@pytest.mark.parametrize("count", [1, 7, V])
def test_top_k_is_the_targets_law(
    count: int, case: tuple[Signals, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    import evaluation.head

    monkeypatch.setattr(evaluation.head, "BLOCK_ELEMENTS", 5 * V)  # several blocks
    signals, head = case
    found = top_k_of(signals, head, count, 0.7)
    exact = (signals.hidden.double() @ head.double().T / 0.7).log_softmax(-1)
    wanted, _ = exact.topk(count, dim=-1)
    torch.testing.assert_close(found.log_probs.double(), wanted, rtol=1e-4, atol=1e-4)
    assert torch.equal(found.ids[:, 0].long(), signals.argmax)
    torch.testing.assert_close(exact.gather(1, found.ids.long()), wanted)
    torch.testing.assert_close(
        found.tail.double(), (1 - wanted.exp().sum(-1)).clamp(min=0), rtol=1e-3, atol=1e-6
    )
