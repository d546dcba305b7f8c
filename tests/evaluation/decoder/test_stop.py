"""Answers end at the right token, with a byte-level tokenizer whose tokens cut characters."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from data.errors import UserError
from evaluation.decoder.stop import StopRules


class Bytes:
    """A byte-level tokenizer of transformers' interface, with a few longer tokens."""

    def __init__(self) -> None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        merges = [("a", "b"), ("ab", "c"), ("Ġ", "x")]
        vocab = {token: i for i, token in enumerate([*alphabet, "ab", "abc", "Ġx"])}
        self.core = Tokenizer(models.BPE(vocab=vocab, merges=merges))
        self.core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self.core.decoder = decoders.ByteLevel()

    def encode(self, text: str) -> list[int]:
        return self.core.encode(text).ids

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return self.core.decode(ids, skip_special_tokens=skip_special_tokens)


TOKENIZER = Bytes()


def stopped(text: str, strings: list[str], step: int, limit: int = 1000) -> tuple[str, str | None, int]:
    """Read a text `step` tokens a round: the answer's text, why it ended, and its tokens."""
    rules, ids, kept = StopRules([], strings, TOKENIZER), TOKENIZER.encode(text), []
    reason = None
    while ids and not reason:
        count, reason = rules.cut(kept, ids[:step], limit)
        kept, ids = kept + ids[:count], ids[step:]
    return TOKENIZER.decode(kept, skip_special_tokens=False), reason, len(kept)


@pytest.mark.parametrize("step", [1, 2, 3, 5, 50])
@pytest.mark.parametrize(
    ("text", "strings", "kept"),
    [
        ("hello world, hello", ["o w"], "hello w"),
        ("one abc two", ["bc"], "one abc"),  # the token "abc" ends it, and is kept whole
        ("one abc two", ["zzz", "e abc t"], "one abc t"),
        ("a\n\nb\n\n", ["\n\n"], "a\n\n"),
        ("naïve café — 日本語 text", ["日本"], "naïve café — 日本"),
        ("x" * 60 + "END more", ["xEND"], "x" * 60 + "END"),
        ("no such thing", ["absent"], "no such thing"),
        ("END", ["END"], "END"),
    ],
)
def test_a_stop_string_ends_an_answer_at_the_token_that_completes_it(
    text: str, strings: list[str], kept: str, step: int
) -> None:
    answer, reason, _ = stopped(text, strings, step)
    assert answer == kept
    assert reason == (None if kept == text and strings == ["absent"] else "stop")


@pytest.mark.parametrize("step", [1, 3, 8])
def test_whatever_comes_first_ends_the_answer(step: int) -> None:
    text = "count to ten STOP"
    assert stopped(text, ["STOP"], step, limit=5)[1:] == ("length", 5)
    assert stopped(text, ["to"], step, limit=8)[1:] == ("stop", 8)  # at the limit a stop is a stop
    rules = StopRules([7, 8], ["zz"], TOKENIZER)
    assert rules.cut([1], [2, 8, 7], 100) == (2, "stop")
    assert rules.cut([1], [2, 3], 3) == (2, "length")
    assert rules.cut([1], [2, 3], 4) == (2, None)


def test_strings_that_cannot_be_looked_for_are_refused() -> None:
    with pytest.raises(UserError, match="tokenizer"):
        StopRules([], ["END"])
    for string in ("", "\ufffd"):
        with pytest.raises(UserError, match="cannot be looked for"):
            StopRules([], [string], TOKENIZER)
