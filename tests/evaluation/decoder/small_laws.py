"""Context-dependent laws over a tiny vocabulary, exact in fractions, and what verification makes of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from fractions import Fraction

import torch

Context = tuple[int, ...]


class SmallLaw:
    """A random distribution over V ids for every context of up to K ids, as fractions."""

    def __init__(self, seed: int, size: int, count: int, support: tuple[int, ...] | None = None) -> None:
        generator = random.Random(seed)
        self.size, self.count = size, count
        self.table: dict[Context, list[Fraction]] = {}
        for length in range(count + 1):
            for context in itertools.product(range(size), repeat=length):
                weights = [
                    generator.randint(1, 9) if support is None or v in support else 0 for v in range(size)
                ]
                self.table[context] = [Fraction(weight, sum(weights)) for weight in weights]

    def chance(self, tokens: Context, start: int = 0) -> Fraction:
        """Of the tokens from `start` on, given those before."""
        result = Fraction(1)
        for i in range(start, len(tokens)):
            result *= self.table[tokens[:i]][tokens[i]]
        return result

    def along(self, drafted: Context, length: int) -> torch.Tensor:
        """float64 `[length, V]`: the distributions before each drafted token, and after the last."""
        rows = [[float(p) for p in self.table[drafted[:i]]] for i in range(length)]
        return torch.tensor(rows, dtype=torch.float64)

    def argmax_draft(self) -> Context:
        drafted: Context = ()
        while len(drafted) < self.count:
            probs = self.table[drafted]
            drafted = (*drafted, probs.index(max(probs)))
        return drafted


def drafts(draft: SmallLaw) -> Iterator[tuple[Context, Fraction]]:
    """Every draft that can be drawn, with its chance."""
    for drafted in itertools.product(range(draft.size), repeat=draft.count):
        if chance := draft.chance(drafted):
            yield drafted, chance


class FractionRule:
    """The rules again, in rational arithmetic, one draft at a time, as the papers write them down."""

    def __init__(self, name: str, target: SmallLaw, draft: SmallLaw) -> None:
        self.name, self.target, self.draft = name, target, draft

    def weights(self, drafted: Context) -> list[Fraction]:
        """P_0 .. P_K of block verification."""
        weights = [Fraction(1)]
        for i, token in enumerate(drafted):
            ratio = self.target.table[drafted[:i]][token] / self.draft.table[drafted[:i]][token]
            weights.append(min(Fraction(1), weights[-1] * ratio))
        return weights

    def excess(self, drafted: Context, i: int) -> list[Fraction]:
        """max(P_i target - draft, 0) by id, after i tokens; P_i = 1 but in block verification."""
        weight = self.weights(drafted)[i] if self.name == "block" else Fraction(1)
        target, draft = self.target.table[drafted[:i]], self.draft.table[drafted[:i]]
        if self.name == "one_hot":
            return [p if v != drafted[i] else Fraction(0) for v, p in enumerate(target)]
        return [max(weight * p - q, Fraction(0)) for p, q in zip(target, draft, strict=True)]

    def accept(self, drafted: Context, proposed: int) -> list[Fraction]:
        chances = []
        for i, token in enumerate(drafted[:proposed]):
            target, draft = self.target.table[drafted[:i]][token], self.draft.table[drafted[:i]][token]
            if self.name == "token":
                chances.append(min(Fraction(1), target / draft))
            elif self.name == "one_hot":
                chances.append(target)
            else:
                weight = self.weights(drafted)[i + 1]
                if i + 1 < proposed:
                    mass = sum(self.excess(drafted, i + 1))
                    whole = mass + 1 - weight
                    weight = mass / whole if whole else Fraction(1)
                chances.append(weight)
        return chances + [Fraction(0)] * (len(drafted) - proposed)

    def accepted(self, decisions: tuple[bool, ...]) -> int:
        if self.name == "block":
            return max((i + 1 for i, yes in enumerate(decisions) if yes), default=0)
        return next((i for i, yes in enumerate(decisions) if not yes), len(decisions))

    def following(self, drafted: Context, accepted: int, proposed: int) -> list[Fraction]:
        if accepted < proposed:
            excess = self.excess(drafted, accepted)
            if mass := sum(excess):
                return [part / mass for part in excess]
        return self.target.table[drafted[:accepted]]


Proposed = Callable[[Context], int]


def fraction_law(rule: FractionRule, proposed: Proposed) -> dict[Context, Fraction]:
    """The joint law of K + 1 tokens: a round, then plain draws of the target where it fell short."""
    target = rule.target
    law = dict.fromkeys(itertools.product(range(target.size), repeat=target.count + 1), Fraction(0))
    pairs = [(rule.draft.argmax_draft(), Fraction(1))] if rule.name == "one_hot" else drafts(rule.draft)
    for drafted, chance in pairs:
        accept = rule.accept(drafted, proposed(drafted))
        for decisions in itertools.product((False, True), repeat=len(drafted)):
            weight = chance
            for yes, part in zip(decisions, accept, strict=True):
                weight *= part if yes else 1 - part
            if not weight:
                continue
            accepted = rule.accepted(decisions)
            following = rule.following(drafted, accepted, proposed(drafted))
            for tokens in law:
                if tokens[:accepted] == drafted[:accepted]:
                    law[tokens] += weight * following[tokens[accepted]] * target.chance(tokens, accepted + 1)
    return law
