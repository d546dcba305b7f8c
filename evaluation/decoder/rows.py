"""What the decoder is asked, what it keeps of a row in flight, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from data.errors import UserError
from evaluation.decoder.accounting import Account


@dataclass(frozen=True)
class Request:
    """A prompt to continue."""

    prompt: Sequence[int]
    max_new_tokens: int
    seed: int = 0
    """Seeds the row's random numbers, which depend on it and on positions alone; unused at temperature 0."""

    def check(self, context: int) -> None:
        """UserError where a decoder of so many positions cannot answer it."""
        if not self.prompt:
            raise UserError("a prompt has no tokens; give at least one.")
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 1.")
        needed = len(self.prompt) + self.max_new_tokens - 1  # the last token is not read
        if needed > context:
            raise UserError(
                f"a prompt of {len(self.prompt)} tokens with max_new_tokens {self.max_new_tokens} "
                f"needs {needed} positions; this decoder has {context}. Shorten one of them."
            )


@dataclass
class States:
    """What the target knew when it chose each emitted token, kept on request: n tokens."""

    hidden: list[torch.Tensor] = field(default_factory=list)
    """pieces of `[n, H]`: the last hidden state after the final norm."""
    logits_summary: list[torch.Tensor] = field(default_factory=list)
    """pieces of float64 `[n, 2]`: log-sum-exp of the logits over the signal temperature, and the most likely
    id.
    """
    features: torch.Tensor | None = None
    """`[P, F]`: what entered the tapped layers at every position that was read, where layers are tapped."""


def summarise(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Log-normaliser at the temperature, and argmax, of logits `[..., V]`: float64 `[..., 2]`."""
    normaliser = (logits / temperature).logsumexp(dim=-1)
    return torch.stack((normaliser.double(), logits.argmax(dim=-1).double()), dim=-1)


@dataclass
class Seconds:
    """Where a row's time went, wall clock."""

    prefill: float = 0.0
    """Up to its first token, from when its turn came."""
    decode: float = 0.0
    """Of the rounds that it took part in, which gave the tokens after that."""
    share: float = 0.0
    """The same, each round split evenly among its rows: adds up to the decoder's seconds."""


@dataclass
class Output:
    """One finished row."""

    tokens: list[int]
    finish_reason: str
    """"stop" at an end-of-sequence token or the token that completes a stop string (both included in
    `tokens`), "length" at max_new_tokens.
    """
    rounds: list[tuple[int, int]]
    """(proposed, accepted) drafts of every round; of a tree those on its longest path."""
    truncated: int
    """Tokens of the last round that fell behind the end."""
    states: States
    expected: dict[str, float] = field(default_factory=dict)
    """Accepted drafts that each rule would have had on average (see `Account.expected`)."""
    siblings: int = 0
    """Drafts of trees that stood beside their longest paths."""
    seconds: Seconds = field(default_factory=Seconds)

    @property
    def account(self) -> Account:
        return Account.of(self.rounds, len(self.tokens), self.truncated, self.expected, self.siblings)


@dataclass
class Row:
    """A row in flight."""

    index: int
    request: Request
    tokens: list[int] = field(default_factory=list)
    rounds: list[tuple[int, int]] = field(default_factory=list)
    truncated: int = 0
    states: States = field(default_factory=States)
    expected: dict[str, float] = field(default_factory=dict)
    siblings: int = 0
    seconds: Seconds = field(default_factory=Seconds)
    finish_reason: str | None = None

    @property
    def left(self) -> int:
        """Tokens that it may still emit."""
        return self.request.max_new_tokens - len(self.tokens)

    @property
    def position(self) -> int:
        """Position of its last token, which no model has seen yet."""
        return len(self.request.prompt) + len(self.tokens) - 1

    @property
    def last(self) -> int:
        """Position of the last token of its longest answer."""
        return len(self.request.prompt) + self.request.max_new_tokens - 1

    def keep(self, hidden: torch.Tensor, summary: torch.Tensor) -> None:
        """Keep the states `[n, H]` and logits' summaries `[n, 2]` that the next n tokens come from."""
        self.states.hidden.append(hidden.clone())
        self.states.logits_summary.append(summary)

    def output(self) -> Output:
        assert self.finish_reason is not None
        return Output(
            self.tokens,
            self.finish_reason,
            self.rounds,
            self.truncated,
            self.states,
            self.expected,
            self.siblings,
            self.seconds,
        )


def common_prefix(prompts: Sequence[Sequence[int]]) -> int:
    """Number of leading tokens that all prompts share, at least one short of the shortest prompt (0 for one
    prompt).
    """
    if len(prompts) < 2:
        return 0
    low, high = min(map(list, prompts)), max(map(list, prompts))
    limit = min(map(len, prompts)) - 1
    return next((i for i in range(limit) if low[i] != high[i]), limit)
