"""A recipe's text: only plain YAML, and every mistake with its line."""

from pathlib import Path

import pytest

from data.errors import UserError
from distill.recipe_file import MAX_BYTES, RecipeError, parse_value, read_recipe_text

BOMB = "a: &a [x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [*{chr(97 + i)}, *{chr(97 + i)}]\n" for i in range(9)
)


def read(tmp_path: Path, content: str | bytes) -> dict[str, object]:
    path = tmp_path / "mine.yaml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return read_recipe_text(path).values


def errors(tmp_path: Path, content: str | bytes) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        read(tmp_path, content)
    return [str(problem).removeprefix(f"{tmp_path}/") for problem in caught.value.problems]


def test_duplicate_keys_are_all_named_with_both_lines(tmp_path: Path) -> None:
    found = errors(tmp_path, "a: 1\nb:\n  c: 1\n  c: 2\na: 3\n")
    assert found == [
        "mine.yaml:4: b.c: given twice (first on line 3); keep one",
        "mine.yaml:5: a: given twice (first on line 1); keep one",
    ]
    assert read(tmp_path, "a: {c: 1}\nb: {c: 2}\n") == {"a": {"c": 1}, "b": {"c": 2}}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (BOMB, "anchors"),
        ("a: &x 1\nb: 2\n", "anchors"),
        ("a: !!python/object/apply:os.system [id]\n", "tags"),
        ("a: !include other.yaml\n", "tags"),
        ("<<: {a: 1}\n", "plain word"),
        ("? [a, b]\n: 1\n", "plain word"),
        ("yes: 1\n", "plain word"),
        ("a: " + "[" * 30 + "]" * 30, "nested deeper"),
        ("a: " + "[" * 60_000, "nested deeper"),
        ("a: [1\n", "not valid YAML"),
        ("a: b: c\n", "not valid YAML"),
        ("a: 1\n---\nb: 2\n", "not valid YAML"),
        ("a:\n\t- 1\n", "not valid YAML"),
        ("a: \x00\n", "not valid YAML"),
        ("", "not a recipe"),
        ("- a\n- b\n", "not a recipe"),
        ("just text\n", "not a recipe"),
        ("a: .inf\n", "finite"),
        ("a: [1, -.inf]\n", "finite"),
        ("a: 1e999\n", "finite"),
        (f"a: {'9' * 30}\n", "too large"),
        (f"a: {'9' * 5000}\n", "cannot be read"),
        (b"a: \xff\xfe\n", "UTF-8"),
        ("a: " + "x" * MAX_BYTES, "64 kB"),
    ],
)
def test_what_is_not_plain_yaml_is_refused(tmp_path: Path, content: str | bytes, words: str) -> None:
    assert words in errors(tmp_path, content)[0]


def test_a_missing_file_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read recipe"):
        read_recipe_text(tmp_path / "none.yaml")


def test_values_and_lines(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("a: 1e-3\nb: {c: 2024-01-02, d: -5E3}\ne:\n  - 1\n  - off: 1\n".replace("off", "key"))
    text = read_recipe_text(path)
    assert text.values == {"a": 1e-3, "b": {"c": "2024-01-02", "d": -5000.0}, "e": [1, {"key": 1}]}
    assert text.where(("e", 1, "key")) == f"{path}:5"
    assert text.where(("b", "nothing")) == f"{path}:2"
    text.overrides[("e",)] = "--set e"  # what the file says below it is gone
    assert text.where(("e", 1, "key")) == "--set e"
    assert text.where(("b", "nothing")) == f"{path}:2"


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("1e-3", 1e-3),
        ("null", None),
        ("[a, 1]", ["a", 1]),
        ("text", "text"),
        ("", None),
        ("{a: 1}", {"a": 1}),
    ],
)
def test_values_of_overrides(source: str, value: object) -> None:
    assert parse_value(source) == value


@pytest.mark.parametrize("source", ["[1", "*x", "!!python/name:os.system", "{a: 1, a: 2}", "9" * 30])
def test_bad_values_of_overrides(source: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        parse_value(source)
