"""From logits to the distribution that is really sampled, and from a uniform number to a token.

Whatever changes the distribution is applied to both models before they are compared, so that `draft_probs` is
exactly what the draft was drawn from. Shapes: any leading `...`, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from data.errors import UserError


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are drawn. `temperature` 0 is greedy; `top_p` 1 keeps the whole distribution."""

    temperature: float = 0.0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise UserError(f"temperature is {self.temperature}; it must be 0 (greedy) or more.")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}; it must be in (0, 1].")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def probabilities(logits: torch.Tensor, options: SamplingOptions) -> torch.Tensor:
    """The sampling distribution `[..., V]` of logits `[..., V]` (dtype kept) at a temperature above 0.

    softmax(logits / temperature), then the nucleus: the smallest set of most likely tokens whose mass reaches
    top_p, renormalised (Holtzman et al. 2020, arXiv 1904.09751).
    """
    assert not options.greedy, "greedy decoding compares argmaxes and needs no distribution"
    probs = torch.softmax(logits / options.temperature, dim=-1)
    if options.top_p >= 1:
        return probs
    ordered, order = probs.sort(dim=-1, descending=True)
    before = ordered.cumsum(dim=-1) - ordered  # mass of the more likely tokens: the first token always stays
    kept = torch.zeros_like(probs).scatter(-1, order, ordered.masked_fill(before >= options.top_p, 0))
    return kept / kept.sum(dim=-1, keepdim=True)


def draw(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Tokens int64 `[...]` drawn from probs `[..., V]` with uniform numbers float64 `[...]` in [0, 1), by
    inversion.

    The cumulative sum is taken in float64: in float32 its rounding over a large vocabulary would shift
    probabilities.
    """
    cumulative = probs.double().cumsum(dim=-1)
    threshold = uniform[..., None] * cumulative[..., -1:]
    # right=True skips tokens of zero probability, also where the threshold is exactly zero.
    return torch.searchsorted(cumulative, threshold, right=True)[..., 0].clamp(max=probs.shape[-1] - 1)


class Uniforms:
    """A private stream of uniform numbers per row, from the row's seed: what a row draws never depends on its
    batch.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.generators = [torch.Generator() for _ in range(rows)]
        self.device = device

    def seed(self, row: int, seed: int) -> None:
        self.generators[row].manual_seed(seed)

    def move(self, source: int, destination: int) -> None:
        """Give the stream of row `source` to row `destination`."""
        self.generators[destination], self.generators[source] = (
            self.generators[source],
            self.generators[destination],
        )

    def next(self, rows: int, count: int) -> torch.Tensor:
        """float64 `[rows, count]` for the first `rows` rows."""
        numbers = [torch.rand(count, generator=g, dtype=torch.float64) for g in self.generators[:rows]]
        return torch.stack(numbers).to(self.device)
