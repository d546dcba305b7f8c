"""Where an answer ends: end-of-sequence ids, stop strings, and the number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from data.errors import UserError

SLACK = 8  # tokens in view before a stop string: a cut character has at most 4 bytes, a token at least 1


class StopRules:
    """Ends an answer at the first token that is an end-of-sequence id or completes a stop string, both
    included, and else at its longest.
    """

    def __init__(self, eos_ids: Sequence[int], strings: Sequence[str] = (), tokenizer: Any = None) -> None:
        """`tokenizer`: transformers' tokenizer of the target, needed for stop strings alone."""
        if strings and tokenizer is None:
            raise UserError("stop strings need the target's tokenizer to read the answer; hand it in.")
        for string in strings:
            if not string or "\ufffd" in string:
                raise UserError(f"stop string {string!r} cannot be looked for; give some readable text.")
        self.eos_ids = frozenset(eos_ids)
        self.strings = tuple(strings)
        self.tokenizer = tokenizer
        # Every token is at least one byte of text, so a string just completed stands in these last tokens.
        self.view = SLACK + max((len(string.encode()) for string in strings), default=0)

    def cut(self, before: Sequence[int], new: Sequence[int], limit: int) -> tuple[int, str | None]:
        """How many of a round's `new` tokens belong to an answer that has the tokens `before` and may have
        `limit`, and why it ends there: "stop", "length", or None where it goes on.
        """
        for count, token in enumerate(new, start=1):
            if token in self.eos_ids or self.completes_string([*before[-self.view :], *new[:count]]):
                return count, "stop"
            if len(before) + count == limit:
                return count, "length"
        return len(new), None

    def completes_string(self, tokens: list[int]) -> bool:
        """Whether the text of an answer's last tokens holds a stop string. (An earlier one would have ended
        it.)
        """
        if not self.strings:
            return False
        text = self.tokenizer.decode(tokens[-self.view :], skip_special_tokens=False)
        return any(string in text for string in self.strings)
