"""What a prompt template is, and the dice that fill it.

A template is a task's wording in several phrasings and a function that throws a *fill*: the content, as a
mapping of the placeholders in the phrasings. Two prompts of one template always differ in their content, not
just in their phrasing, so that a test prompt's answer is never that of a training prompt in other words.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import TypeVar

T = TypeVar("T")


class Dice:
    """A seeded source of choices.

    Built on `random.Random.random` alone, the one method whose sequence Python promises to keep, so that the
    shipped prompts (and their ids and splits) are the same on every Python version.
    """

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed).random

    def below(self, limit: int) -> int:
        """An integer in [0, limit)."""
        return int(self._random() * limit)

    def between(self, low: int, high: int) -> int:
        """An integer in [low, high], both included."""
        return low + self.below(high - low + 1)

    def one(self, items: Sequence[T]) -> T:
        """One of `items`."""
        return items[self.below(len(items))]

    def some(self, items: Sequence[T], count: int) -> list[T]:
        """`count` different members of `items`, in the order in which they fell."""
        rest = list(items)
        return [rest.pop(self.below(len(rest))) for _ in range(count)]

    def digits(self, pattern: str) -> str:
        """`pattern` with every `#` replaced by a digit from 1 to 9."""
        return "".join(str(self.between(1, 9)) if letter == "#" else letter for letter in pattern)


Fill = dict[str, str]


@dataclass(frozen=True)
class Template:
    """One kind of prompt: `phrasings` hold {placeholders} that a throw of `fill` gives values for.

    `held_out` templates are for tests only: no prompt of theirs is ever trained on.
    """

    name: str
    task: str
    phrasings: tuple[str, ...]
    fill: Callable[[Dice], Fill]
    held_out: bool = False


def fills(template: Template, count: int) -> Iterator[str]:
    """The first `count` prompt texts of a template, all of different content, the same ones at every call.

    A text's content is what its phrasing says of a fill, whatever the capitals and the question mark.
    """
    dice = Dice(f"{template.task}/{template.name}")
    seen: set[frozenset[tuple[str, str]]] = set()
    for _ in range(50 * count):
        if len(seen) == count:
            return
        fill = template.fill(dice)
        phrasing = dice.one(template.phrasings)
        said = [name for _, name, _, _ in Formatter().parse(phrasing) if name]
        content = frozenset((name, fill[name].casefold().rstrip("?")) for name in said)
        if content not in seen:
            seen.add(content)
            yield phrasing.format(**fill)
    raise AssertionError(f"template {template.name} has fewer than {count} different fills")
