"""How tokens are drawn: from logits to the distribution that is really sampled.

Whatever changes the distribution is applied to both models before they are compared, so that `draft_probs` is
exactly what the draft was drawn from: first what depends on the text so far (`penalties.py`), then
temperature and truncation. Shapes: any leading `...`, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from data.errors import UserError


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are drawn; by default greedily, from the unchanged distribution."""

    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    """The smallest set of most likely tokens whose mass reaches `top_p`; 1 keeps all."""
    top_k: int = 0
    """The `top_k` most likely tokens; 0 keeps all."""
    min_p: float = 0.0
    """Tokens at least `min_p` times as likely as the most likely one."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens in prompt or answer, and multiplies their negative ones."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens in the answer so far."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time that it stands in the answer so far."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these ids."""

    def __post_init__(self) -> None:
        checks = {
            "temperature": (self.temperature >= 0, "0 (greedy) or more"),
            "top_p": (0 < self.top_p <= 1, "in (0, 1]"),
            "top_k": (isinstance(self.top_k, int) and self.top_k >= 0, "a whole number, 0 (off) or more"),
            "min_p": (0 <= self.min_p <= 1, "in [0, 1]"),
            "repetition_penalty": (self.repetition_penalty > 0, "above 0 (1 is off)"),
            "presence_penalty": (True, "finite"),
            "frequency_penalty": (True, "finite"),
        }
        for name, (right, wanted) in checks.items():
            value = getattr(self, name)
            if not right or not math.isfinite(value):
                raise UserError(f"{name} is {value}; it must be {wanted}.")
        for token, bias in self.logit_bias.items():
            if token < 0 or not bias < math.inf:
                raise UserError(
                    f"logit_bias gives id {token} a bias of {bias}; give ids from 0, biases below inf."
                )

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> SamplingOptions:
        """Options by name, as a request or a file gives them; UserError for a name that is not supported."""
        names = [entry.name for entry in dataclasses.fields(cls)]
        if unknown := sorted(set(settings) - set(names)):
            raise UserError(
                f"sampling option {', '.join(unknown)} is not supported; choose from {', '.join(names)}."
            )
        return cls(**settings)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalises(self) -> bool:
        """Whether a token's logit depends on the text so far."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


def probabilities(logits: torch.Tensor, options: SamplingOptions) -> torch.Tensor:
    """The sampling distribution `[..., V]` of logits `[..., V]` (dtype kept) at a temperature above 0.

    softmax(logits / temperature), then top-k, then the nucleus of what is left (Holtzman et al. 2020, arXiv
    1904.09751), then min-p (Nguyen et al. 2024, arXiv 2407.01082), renormalised: transformers' order.
    """
    assert not options.greedy, "greedy decoding compares argmaxes and needs no distribution"
    probs = torch.softmax(logits / options.temperature, dim=-1)
    kept = probs
    if options.top_p < 1 or options.top_k:
        ordered, order = probs.sort(dim=-1, descending=True)
        if options.top_k:
            ordered = torch.cat(
                (ordered[..., : options.top_k], torch.zeros_like(ordered[..., options.top_k :])), dim=-1
            )
        if options.top_p < 1:
            cumulative = ordered.cumsum(dim=-1)
            # Mass of the more likely tokens: the first token always stays.
            before = cumulative - ordered
            ordered = ordered.masked_fill(before >= options.top_p * cumulative[..., -1:], 0)
        kept = torch.zeros_like(probs).scatter(-1, order, ordered)
    if options.min_p:
        kept = kept.masked_fill(kept < options.min_p * kept.amax(dim=-1, keepdim=True), 0)
    return probs if kept is probs else kept / kept.sum(dim=-1, keepdim=True)
