"""Near copies: which pairs are found, against brute force, and that none of them crosses the splits."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from data.near_copies import THRESHOLD, near_pairs, normalise
from data.prompts import Prompt, PromptSource, Splits, load_prompts


def sentence(generator: random.Random, words: int = 30) -> str:
    """Made-up words, so that nothing is common to all texts."""
    return " ".join("".join(generator.choices("abcdefghijklmnop", k=6)) for _ in range(words))


def edited(generator: random.Random, text: str, edits: int) -> str:
    words = text.split()
    for _ in range(edits):
        words[generator.randrange(len(words))] = generator.choice(
            ["", sentence(generator, 1), sentence(generator, 2).upper()]
        )
    return " ".join(words)


def family(seed: int, count: int = 40) -> list[str]:
    """Texts, each with copies that differ from it more and more."""
    generator = random.Random(seed)
    texts = []
    for _ in range(count):
        base = sentence(generator)
        texts += [base, *(edited(generator, base, edits) for edits in (1, 2, 3, 5, 9))]
    generator.shuffle(texts)
    return texts


def jaccard(first: str, second: str) -> float:
    """By the definition, without hashes."""
    one, two = ({t[i : i + 5] for i in range(len(t) - 4)} for t in (normalise(first), normalise(second)))
    return len(one & two) / len(one | two)


def brute_force(texts: list[str]) -> set[tuple[int, int]]:
    return {(i, j) for j in range(len(texts)) for i in range(j) if jaccard(texts[i], texts[j]) >= THRESHOLD}


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_pairs_are_those_of_the_definition(seed: int) -> None:
    texts = family(seed)
    found = list(near_pairs(texts, [True] * len(texts)))
    wanted = brute_force(texts)
    assert 40 <= len(wanted) < len(texts) ** 2 / 4
    assert set(found) == wanted
    assert [j for _, j in found] == sorted(j for _, j in found)


def test_pairs_of_which_neither_is_compared_are_left_alone() -> None:
    texts = family(4)
    compared = [i % 3 == 0 for i in range(len(texts))]
    wanted = {(i, j) for i, j in brute_force(texts) if compared[i] or compared[j]}
    assert set(near_pairs(texts, compared)) == wanted != brute_force(texts)


def test_case_blanks_and_punctuation_do_not_count() -> None:
    assert list(near_pairs(["Tell me -- about Rivers!", "tell me about rivers"], [True, True])) == [(0, 1)]


def test_what_all_texts_begin_with_is_no_likeness() -> None:
    generator = random.Random(5)
    form = sentence(generator, 200)
    texts = [f"{form} {sentence(generator, 8)}" for _ in range(60)]
    assert jaccard(texts[0], texts[1]) > THRESHOLD, "by the plain definition all of them were copies"
    assert not list(near_pairs(texts, [True] * 60))
    copy = [*texts, texts[7] + " please"]
    assert list(near_pairs(copy, [True] * 61)) == [(7, 60)]


@pytest.mark.parametrize("texts", [[], ["a"], ["", ""], ["ab", "ab", "cd"], ["\u00e9t\u00e9 \u4f60\u597d"]])
def test_short_and_foreign_texts_are_no_trouble(texts: list[str]) -> None:
    expected = {(i, j) for j in range(len(texts)) for i in range(j) if texts[i] == texts[j]}
    assert set(near_pairs(texts, [True] * len(texts))) == expected


# What it is for.


def load(*sources: str) -> list[Prompt]:
    return load_prompts(
        [PromptSource(source=source) for source in sources], splits=Splits(select=0.2, test=0.2), seed=0
    )


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    import json

    def to_file(texts: list[str], name: str = "a.jsonl") -> str:
        (tmp_path / name).write_text("\n".join(json.dumps({"prompt": text}) for text in texts))
        return f"file:{tmp_path / name}"

    return to_file


def texts_of(prompts: list[Prompt], train: bool) -> list[str]:
    return [p.messages[-1][1] for p in prompts if (p.split == "train") == train]


@pytest.mark.parametrize("seed", range(6))
def test_no_held_out_prompt_nor_a_near_copy_of_one_reaches_training(
    seed: int, write: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    texts = family(seed, 25)
    half = len(texts) // 2
    prompts = load(write(texts[:half]), write(texts[half:], "b.jsonl"))
    train, held_out = texts_of(prompts, True), texts_of(prompts, False)
    assert train and held_out
    assert not set(map(normalise, train)) & set(map(normalise, held_out))
    assert max(jaccard(one, two) for one in train for two in held_out) < THRESHOLD
    assert "near copies" in caplog.text
    # Nothing more is lost than that: each text is there, or near one that is.
    kept = [*train, *held_out]
    assert all(max(jaccard(text, other) for other in kept) >= THRESHOLD**2 / 2 for text in texts)


def test_without_the_removal_copies_do_cross_the_splits(
    write: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data.prompts.near_pairs", lambda texts, compared: iter(()))
    prompts = load(write(family(0, 25)))
    crossing = [
        (one, two)
        for one in texts_of(prompts, True)
        for two in texts_of(prompts, False)
        if jaccard(one, two) >= THRESHOLD
    ]
    assert crossing


def test_a_near_copy_of_a_shipped_held_out_prompt_is_not_trained_on(write: Callable[..., str]) -> None:
    shipped = load("builtin:json")
    held_out = [p for p in shipped if p.split != "train"]
    copies = [p.messages[0][1].replace(",", " ,").upper() + " please" for p in held_out]
    mixed = load("builtin:json", write([*copies, "Tell me about rivers in winter"]))
    train = texts_of(mixed, True)
    assert not set(train) & set(copies)
    # The shipped prompts stay as they are without a file, for results must stay comparable.
    assert {p for p in mixed if p.source == "builtin:json"} == set(shipped)
    assert "Tell me about rivers in winter" in texts_of(mixed, True) + texts_of(mixed, False)
