"""Recipes: every mistake at once, each with its place and a near miss; overrides; names that stay inside
recipes/.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from data.errors import UserError
from distill.recipe import RECIPES, Recipe, find_recipe, load_recipe
from distill.recipe_file import Problem, RecipeError

BASE = (RECIPES / "smoke.yaml").read_text()
Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a recipe's text to a file and return its path."""

    def write(text: str) -> str:
        path = tmp_path / "mine.yaml"
        path.write_text(text)
        return str(path)

    return write


def problems(path: str, *overrides: str) -> list[Problem]:
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    assert all(str(problem) in str(caught.value) for problem in caught.value.problems)
    return caught.value.problems


def line_of(text: str, start: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if line.strip().startswith(start))


def test_all_errors_are_shown_together_with_their_places(write: Write) -> None:
    text = (
        BASE.replace("learning_rate: 1e-3", "lerning_rate: 1e-3")
        .replace("name: forward_kl", "name: forward_lk")
        .replace("dtype: float32", "dtype: float33")
        .replace("tokens: 1200", "tokens: many")
        .replace("seed: 1", "seed: -1")
        .replace("export:", "exports:")
        .replace("top_p: 1.0", "top_p: 2.0")
    )
    path = write(text)
    found = {problem.path: problem for problem in problems(path)}
    expected = {
        "train.lerning_rate": ("lerning_rate:", "did you mean learning_rate?"),
        "train.loss.name": ("loss:", "did you mean forward_kl?"),
        "target.dtype": ("dtype:", "did you mean float32?"),
        "sample.tokens": ("tokens: many", "'many'"),
        "seed": ("seed:", "-1"),
        "exports": ("exports:", "did you mean export?"),
        "serving.top_p": ("top_p:", "2.0"),
    }
    for place, (start, words) in expected.items():
        assert found[place].where == f"{path}:{line_of(text, start)}"
        assert words in found[place].text
    assert "missing" in found["export"].text
    assert set(found) == {*expected, "export"}


def test_cross_checks_join_the_other_errors(write: Write) -> None:
    text = BASE.replace("temperature: [0.0, 1.0]", "temperature: [1.0]").replace("top_p", "top_q")
    found = {problem.path for problem in problems(write(text.replace("layers: [0, 3]", "layers: []")))}
    assert {"serving.top_q", "draft.init.layers"} <= found
    found = {problem.path for problem in problems(write(text.replace("top_q", "top_p")))}
    assert found == {"sample.temperature"}


@pytest.mark.parametrize(
    ("old", "new", "path", "words"),
    [
        ("model: random:1", "model: org/name", "target.revision", "40 hex digits"),
        ("model: random:1", "model: org/name\n  revision: main", "target.revision", "40 hex digits"),
        ("model: random:1", f"model: random:1\n  revision: {'a' * 40}", "target.revision", "null"),
        ("from: target", "from: org/name", "draft.revision", "40 hex digits"),
        (
            "vocab_size: 256",
            f"vocab_size: 256\n  revision: {'a' * 40}",
            "draft.revision",
            "leave revision out",
        ),
        ("    layers: [0, 3]\n", "", "draft.init.layers", "layers to keep"),
        ("layers: [0, 3]", "layers: [3, 0]", "draft.init.layers", "ascending"),
        ("layers: [0, 3]", "layers: [0, 3]\n    layer_count: 2", "draft.init.layer_count", "not both"),
        ("signal: hidden", "signal: hidden\n  temperature: 0.7", "train.temperature", "signal: live"),
        ("layers: [0, 3]", "layers: [0, 0]", "draft.init.layers", "once"),
        ("argmax\n  batch_size: 1", "argmax\n  batch_size: 2", "evaluate.prompts", "give 10 or more"),
        ("source: builtin:structured", "source: builtin:nothing", "data.prompts.0.source", "builtin:NAME"),
        ("test: 0.15", "test: 0.95", "data.splits", "below 1"),
    ],
)
def test_settings_that_do_not_fit_together(write: Write, old: str, new: str, path: str, words: str) -> None:
    assert old in BASE
    found = problems(write(BASE.replace(old, new)))
    assert [problem.path for problem in found] == [path]
    assert words in found[0].text


def test_a_model_with_a_pinned_commit_is_accepted(write: Write) -> None:
    text = BASE.replace("model: random:1", f"model: org/name\n  revision: {'0' * 39}a")
    assert load_recipe(write(text)).target.model == "org/name"


def test_numbers_with_exponents_are_numbers() -> None:
    assert load_recipe("smoke").train.learning_rate == 0.001
    assert load_recipe("smoke", ["train.learning_rate=2e-5"]).train.learning_rate == 2e-5


def test_overrides_are_read_as_yaml_and_the_last_one_wins() -> None:
    recipe = load_recipe(
        "smoke",
        [
            "train.loss.name=tvd",
            "draft.init.layers=[1, 2]",
            "draft.vocab_size=null",
            "seed=5",
            "seed=7",
            "evaluate={prompts: 3, num_speculative_tokens: [2]}",
        ],
    )
    assert recipe.train.loss.name == "tvd"
    assert recipe.draft.init.layers == [1, 2]
    assert recipe.draft.vocab_size is None
    assert (recipe.seed, recipe.evaluate.prompts) == (7, 3)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.lerning_rate=1", "did you mean learning_rate?"),
        ("train.lr=1", "did you mean learning_rate?"),
        ("trian.loss.name=tvd", "did you mean train?"),
        ("train.loss.nme=tvd", "did you mean name?"),
        ("train.loss.name.deeper=1", "has no parts"),
        ("seed", "--set section.key=value"),
        ("=1", "--set section.key=value"),
        ("train..loss=1", "--set section.key=value"),
        ("name=other", "unknown key"),
        ("seed=[1", "not valid YAML"),
        ("seed=!!python/object:os.system x", "tags"),
        ("seed=much", "'much'"),
        ("train.learning_rate=.nan", "finite"),
    ],
)
def test_wrong_overrides_are_named(override: str, words: str) -> None:
    found = problems("smoke", override)
    assert len(found) == 1
    assert words in str(found[0]) and "--set" in found[0].where


def test_all_wrong_overrides_are_shown() -> None:
    assert len(problems("smoke", "a=1", "train.b=2", "seed=x")) == 3


def test_secrets_have_no_place_and_are_not_repeated(write: Write) -> None:
    secret = "hf_" + "abcdefgh1234"
    path = write(BASE.replace("target:\n", f"target:\n  hf_token: {secret}\n"))
    with pytest.raises(RecipeError, match="no secrets") as caught:
        load_recipe(path, [f"target.api_key={secret}"])
    assert secret not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["../smoke", "a/b", "/etc/passwd", "", "..", ".hidden", "smoke\n", "a b", "é"]
)
def test_names_stay_inside_the_folder(name: str) -> None:
    with pytest.raises(UserError, match="recipe"):
        find_recipe(name)


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "recipes"
    folder.mkdir()
    (tmp_path / "outside.yaml").write_text(BASE)
    (folder / "inside.yaml").write_text(BASE)
    (folder / "link.yaml").symlink_to(tmp_path / "outside.yaml")
    monkeypatch.setattr("distill.recipe.RECIPES", folder)
    assert load_recipe("inside").name == "inside"
    with pytest.raises(UserError, match="no recipe 'link'"):
        load_recipe("link")


def test_an_unknown_name_gets_a_near_miss_and_the_list() -> None:
    with pytest.raises(UserError, match=r"did you mean smollm2-135m\?.*llama-1b, .*smoke") as caught:
        find_recipe("smolm2-135m")
    assert not isinstance(caught.value, RecipeError)


@pytest.mark.parametrize("name", ["missing.yaml", "odd name.yaml"])
def test_files_must_exist_and_have_a_plain_name(tmp_path: Path, name: str) -> None:
    if name != "missing.yaml":
        (tmp_path / name).write_text(BASE)
    with pytest.raises(UserError, match="recipe"):
        load_recipe(str(tmp_path / name))


def test_resolved_recipe_writes_defaults_out() -> None:
    recipe = load_recipe("smoke")
    values: dict[str, Any] = yaml.safe_load(recipe.resolved_yaml())
    init = {"from": "target", "layers": [0, 3], "layer_count": None, "choose_by": "importance", "width": None}
    assert values["draft"]["init"] == init
    assert values["train"]["loss"]["eta"] == 3.0
    assert "name" not in values and isinstance(values["train"]["learning_rate"], float)
    assert not set(Recipe.model_fields) & {"token", "secret", "password"}
