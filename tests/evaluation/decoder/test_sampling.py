import pytest
import torch

from data.errors import UserError
from evaluation.decoder.sampling import SamplingOptions, Uniforms, draw, probabilities


def test_temperature_divides_the_logits() -> None:
    logits = torch.tensor([[0.0, 2.0, -1.0]], dtype=torch.float64)
    probs = probabilities(logits, SamplingOptions(0.5))
    assert torch.allclose(probs, (logits * 2).exp() / (logits * 2).exp().sum())


def test_top_p_keeps_the_smallest_sufficient_set_and_renormalises() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64).log()
    assert probabilities(logits, SamplingOptions(1.0, 0.6)).tolist() == pytest.approx([0.625, 0.375, 0, 0])
    assert probabilities(logits, SamplingOptions(1.0, 0.01)).tolist() == pytest.approx([1, 0, 0, 0])


def test_draw_inverts_the_cumulative_distribution_and_never_gives_a_token_of_no_mass() -> None:
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]])
    for uniform, token in ((0.0, 1), (0.2499, 1), (0.2501, 3), (1 - 1e-16, 3)):
        assert draw(probs, torch.tensor([uniform], dtype=torch.float64)).tolist() == [token]


def test_a_rows_numbers_depend_on_its_seed_alone() -> None:
    alone, crowd = Uniforms(1, torch.device("cpu")), Uniforms(3, torch.device("cpu"))
    alone.seed(0, 7)
    for row, seed in enumerate((5, 6, 7)):
        crowd.seed(row, seed)
    assert torch.equal(alone.next(1, 4)[0], crowd.next(3, 4)[2])
    crowd.move(2, 0)
    assert torch.equal(alone.next(1, 4)[0], crowd.next(1, 4)[0])


@pytest.mark.parametrize("options", [{"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_impossible_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(UserError):
        SamplingOptions(**options)
