"""What the sampling stage asks of an engine: continue prompts with the target's own distribution."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from data.signals import Signals


@dataclass(frozen=True)
class SampleRequest:
    """One prompt to continue."""

    prompt: Sequence[int]
    seed: int


@dataclass
class Completion:
    """The target's continuation of one prompt."""

    tokens: list[int]
    """New token ids, with the end-of-sequence token where the target chose one."""
    finish_reason: str
    """"stop" or "length"."""
    signals: Signals | None
    """What the target knew at each new token; None from an engine that cannot tell."""


class SamplingEngine(Protocol):
    """Samples the target. Completions come in the order of the requests and depend on nothing but requests
    and model.
    """

    def sample(
        self,
        requests: Sequence[SampleRequest],
        *,
        temperature: float,
        max_new_tokens: int,
        on_tokens: Callable[[int], None],
    ) -> list[Completion]:
        """Continue every request; `on_tokens` hears numbers of new tokens as they come."""
