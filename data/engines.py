"""What the sampling stage asks of an engine: continue prompts with the target's own distribution."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from data.errors import UserError

if TYPE_CHECKING:
    from data.signals import Signals, TopK

FAILURES_IN_A_ROW = 10
"""So many failed answers one after another are no bad luck: the server is gone, or misunderstood."""


@dataclass(frozen=True)
class SampleRequest:
    """One prompt to continue."""

    prompt: Sequence[int]
    seed: int
    id: str = ""
    """Tells the samples of a stage apart; stands in what is handed to others."""
    messages: Sequence[tuple[str, str]] = ()
    """The (role, content) that `prompt` was rendered from, for engines that render it themselves."""


@dataclass
class Completion:
    """The target's continuation of one prompt."""

    tokens: list[int]
    """New token ids, with the end-of-sequence token where the target chose one."""
    finish_reason: str
    """"stop" or "length"."""
    signals: Signals | TopK | None
    """What the target knew at each new token; None from an engine that cannot tell."""
    reencoded: bool = False
    """The engine gave text alone, so `tokens` are our tokenizer's reading of it."""


@dataclass(frozen=True)
class Failure:
    """No usable answer to one request, and why: the sample is quarantined."""

    reason: str


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
    ) -> Sequence[Completion | Failure]:
        """Continue every request; `on_tokens` hears numbers of new tokens as they come."""


class FailureStreak:
    """Ends the work with a `UserError` where too many answers in a row have failed."""

    def __init__(self) -> None:
        self.length = 0

    def hear(self, result: Completion | Failure) -> None:
        """Count one result."""
        if isinstance(result, Completion):
            self.length = 0
            return
        self.length += 1
        if self.length >= FAILURES_IN_A_ROW:
            raise UserError(
                f"{self.length} answers in a row failed, the last one with: {result.reason}. Finished shards "
                "are kept: mend that and run the same command to go on."
            )
