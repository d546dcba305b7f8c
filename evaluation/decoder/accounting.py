"""What became of the drafts: counts of a row or of many, and the rates that follow from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass
class Account:
    """Counts over rounds. Every token is accounted for: `check` says so or fails."""

    rows: int = 0
    """Answers, of which each begins with one token from its prefill."""
    rounds: int = 0
    drafted: int = 0
    """Drafts proposed for verification; of a tree those on its longest path."""
    siblings: int = 0
    """Drafts proposed beside them."""
    accepted: int = 0
    """Of them accepted, those behind an answer's end included."""
    emitted: int = 0
    """Tokens of the answers."""
    truncated: int = 0
    """Tokens that the last rounds had let through behind an answer's end."""
    expected: dict[str, float] = field(default_factory=dict)
    """By rule: the mean of `accepted` over its uniform numbers, given the same drafts and distributions."""
    offered: list[int] = field(default_factory=list)
    """Rounds that proposed a draft at position i."""
    reached: list[int] = field(default_factory=list)
    """Of them, those that accepted all drafts before it."""
    stood: list[int] = field(default_factory=list)
    """Of them, those that accepted it too."""

    @classmethod
    def of(
        cls,
        rounds: Sequence[tuple[int, int]],
        emitted: int,
        truncated: int,
        expected: dict[str, float] | None = None,
        siblings: int = 0,
    ) -> Account:
        """One answer's account, from the (proposed, accepted) drafts of its rounds."""
        longest = range(max((proposed for proposed, _ in rounds), default=0))
        return cls(
            rows=1,
            rounds=len(rounds),
            drafted=sum(proposed for proposed, _ in rounds),
            siblings=siblings,
            accepted=sum(accepted for _, accepted in rounds),
            emitted=emitted,
            truncated=truncated,
            expected=dict(expected or {}),
            offered=[sum(p > i for p, _ in rounds) for i in longest],
            reached=[sum(p > i and a >= i for p, a in rounds) for i in longest],
            stood=[sum(a > i for _, a in rounds) for i in longest],
        )

    @classmethod
    def total(cls, accounts: Iterable[Account]) -> Account:
        """The sum of several accounts."""
        result = cls()
        for account in accounts:
            for name in ("rows", "rounds", "drafted", "siblings", "accepted", "emitted", "truncated"):
                setattr(result, name, getattr(result, name) + getattr(account, name))
            for name in ("offered", "reached", "stood"):
                setattr(result, name, added(getattr(result, name), getattr(account, name)))
            for rule, value in account.expected.items():
                result.expected[rule] = result.expected.get(rule, 0.0) + value
        return result

    def check(self) -> None:
        """Every answer's tokens are its prefill's one, and each round's accepted drafts and one token more,
        less what stood behind its end.
        """
        kept = self.rows + self.accepted + self.rounds - self.truncated
        assert self.emitted == kept, f"emitted {self.emitted} tokens, accounted for {kept}: {self}"
        assert self.accepted == sum(self.stood) and self.drafted == sum(self.offered), self

    @property
    def conditional_acceptance(self) -> list[float | None]:
        """By position: accepted among the rounds that accepted all before it and proposed it."""
        return rates(self.stood, self.reached)

    @property
    def unconditional_acceptance(self) -> list[float | None]:
        """By position: accepted among all rounds that proposed it."""
        return rates(self.stood, self.offered)


def added(first: list[int], second: list[int]) -> list[int]:
    size = max(len(first), len(second))
    return [sum(counts) for counts in zip(padded(first, size), padded(second, size), strict=True)]


def padded(counts: list[int], size: int) -> list[int]:
    return counts + [0] * (size - len(counts))


def rates(part: list[int], whole: list[int]) -> list[float | None]:
    return [p / w if w else None for p, w in zip(part, whole, strict=True)]
