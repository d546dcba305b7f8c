import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from data.errors import UserError
from evaluation.decoder.sampling import SamplingOptions, probabilities


def test_temperature_divides_the_logits() -> None:
    logits = torch.tensor([[0.0, 2.0, -1.0]], dtype=torch.float64)
    probs = probabilities(logits, SamplingOptions(0.5))
    assert torch.allclose(probs, (logits * 2).exp() / (logits * 2).exp().sum())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"top_p": 0.6}, [0.625, 0.375, 0, 0]),
        ({"top_p": 0.01}, [1, 0, 0, 0]),
        ({"top_k": 1}, [1, 0, 0, 0]),
        ({"top_k": 9}, [0.5, 0.3, 0.15, 0.05]),
        ({"min_p": 0.25}, [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]),
        ({"top_k": 3, "top_p": 0.55}, [0.625, 0.375, 0, 0]),
    ],
)
def test_truncation_keeps_the_right_set_and_renormalises(options: dict, expected: list[float]) -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64).log()
    assert probabilities(logits, SamplingOptions(1.0, **options)).tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(0, 0.8, 0.0), (7, 1.0, 0.0), (7, 0.7, 0.1), (0, 1.0, 0.2)]
)
def test_the_distribution_is_transformers(top_k: int, top_p: float, min_p: float) -> None:
    logits = torch.randn(50, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2
    warpers = LogitsProcessorList([TemperatureLogitsWarper(0.7)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    warpers += [TopPLogitsWarper(top_p), MinPLogitsWarper(min_p)]
    theirs = warpers(torch.zeros(50, 1, dtype=torch.int64), logits).softmax(dim=-1)
    assert torch.allclose(
        probabilities(logits, SamplingOptions(0.7, top_p, top_k, min_p)), theirs, atol=1e-12
    )


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.5}, {"top_k": -1}, {"top_k": 2.5}, {"min_p": 1.1},
        {"repetition_penalty": 0.0}, {"presence_penalty": float("nan")}, {"logit_bias": {-1: 1.0}},
        {"logit_bias": {1: float("inf")}}, {"temperature": float("inf")},
    ],
)  # fmt: skip
def test_impossible_options_are_refused(options: dict) -> None:
    with pytest.raises(UserError):
        SamplingOptions(**options)


def test_an_option_that_is_not_supported_is_refused_by_name() -> None:
    assert SamplingOptions.of({"temperature": 0.5, "top_k": 3}) == SamplingOptions(0.5, top_k=3)
    with pytest.raises(UserError, match="typical_p"):
        SamplingOptions.of({"temperature": 0.5, "typical_p": 0.9})
