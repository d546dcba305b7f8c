"""The shipped recipes: each validates, is flat and short, and says what it needs."""

import json
import re
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from data.files import sha256_file
from distill.context import Run
from distill.recipe import RECIPES, load_recipe, recipe_names
from distill.recipe_checks import COMMIT
from distill.recipe_file import RecipeError
from distill.sizes import GIB, disk_needed, memory_needed, sizes_of

NAMES = recipe_names()


def test_the_promised_recipes_are_there() -> None:
    assert {"smollm2-135m", "smollm2-135m-open", "smoke", "llama-1b", "llama-1b-wide"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_validates_and_reads_back_the_same(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    recipe = load_recipe(name)
    copy = tmp_path_factory.mktemp("copy") / f"{name}.yaml"
    copy.write_text(recipe.resolved_yaml())
    assert load_recipe(str(copy)) == recipe


@pytest.mark.parametrize("name", NAMES)
def test_is_a_short_file_with_a_header(name: str) -> None:
    lines = (RECIPES / f"{name}.yaml").read_text().splitlines()
    assert 40 <= len(lines) <= 75
    header = "\n".join(lines[:12])
    assert all(re.search(rf"^# {word}\b", header, re.MULTILINE) for word in ("Hardware", "Time", "Expected"))


@pytest.mark.parametrize("name", ["llama-1b", "llama-1b-served", "llama-1b-wide"])
def test_hub_recipes_are_pinned_and_sized(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.target.revision == "0e9e39f249a16976918f6564b8830bc894c89659"
    assert recipe.draft.revision == "9213176726f574b556790deb65791e0c5aa438b6"
    assert all(COMMIT.search(source.source) for source in recipe.data.prompts)
    assert recipe.sample.tokens >= 20_000_000
    assert recipe.estimate is not None and recipe.estimate.gpu_hours > 0


@pytest.mark.parametrize(
    "name", ["llama-1b", "llama-1b-served", "llama-1b-wide", "llama-8b-medusa", "llama-8b-eagle3"]
)
def test_the_machine_that_a_header_asks_for_passes_preflight(name: str) -> None:
    header = (RECIPES / f"{name}.yaml").read_text()
    disk, gpu = (re.search(pattern, header) for pattern in (r"(\d+) GiB of disk", r"one GPU of (\d+) GiB"))
    recipe = load_recipe(name)
    sizes = sizes_of(recipe)
    assert disk and gpu and sizes
    own = sizes.draft if recipe.draft.kind == "model" else 0
    downloads = 2 * (sizes.target + own) + 3 * GIB  # bfloat16, and the data sets
    assert disk_needed(recipe, sizes) + downloads <= int(disk[1]) * GIB
    assert memory_needed(recipe, sizes) <= int(gpu[1]) * GIB


def test_a_narrower_drafter_keeps_more_numbers_a_token_for_the_same_parameters() -> None:
    recipe = load_recipe("llama-1b", ["train.batch_size=64"])
    sizes = sizes_of(recipe)
    assert sizes and (sizes.hidden, sizes.draft_hidden) == (4096, 2048)
    wide = memory_needed(recipe, replace(sizes, draft_hidden=4096))
    tokens = 64 * (recipe.data.max_prompt_tokens + recipe.sample.max_new_tokens) // 2
    added = tokens * 3 * sizes.draft * 2 * (1 / 2048 - 1 / 4096)
    assert memory_needed(recipe, sizes) - wide == pytest.approx(1.1 * added, rel=0.01)


@pytest.mark.parametrize("name", ["llama-8b-medusa", "llama-8b-eagle3"])
def test_heads_for_hub_targets_are_sized_as_they_are_built(name: str) -> None:
    """`estimate.draft_parameters` against Llama-3.1-8B: width 4096, 8 key-value heads of 128."""
    recipe = load_recipe(name)
    assert recipe.target.revision == "0e9e39f249a16976918f6564b8830bc894c89659"
    assert recipe.estimate is not None and recipe.estimate.gpu_hours > 0
    width, vocab, kv, feed = 4096, recipe.draft.vocab_size or 128256, 1024, 14336
    if recipe.draft.kind == "medusa":
        parameters = (recipe.draft.heads or 0) * (width * width + vocab * width)
    else:
        attention = 2 * width * (width + 2 * kv) + width * width
        parameters = 3 * width * width + attention + 3 * width * feed + vocab * width + 4 * width
    assert recipe.estimate.draft_parameters == parameters


@pytest.mark.parametrize("name", ["smollm2-135m-medusa", "smollm2-135m-eagle"])
def test_heads_compare_with_the_default_drafter(name: str) -> None:
    """The same target, prompts, samples and serving mode: `distill bench kinds` refuses others."""
    ours, default = load_recipe(name), load_recipe("smollm2-135m")
    for section in ("seed", "target", "data", "sample", "serving"):
        assert getattr(ours, section) == getattr(default, section), section
    assert ours.train.signal == default.train.signal
    assert ours.evaluate.prompts == default.evaluate.prompts


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_key_in_any_section_is_refused(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    values = yaml.safe_load((RECIPES / f"{name}.yaml").read_text())
    sections = [key for key, value in values.items() if isinstance(value, dict)]
    for section in sections:
        values[section]["surprise"] = 1
    path = tmp_path_factory.mktemp("odd") / f"{name}.yaml"
    path.write_text(yaml.safe_dump(values))
    with pytest.raises(RecipeError) as caught:
        load_recipe(str(path))
    assert {f"{section}.surprise" for section in sections} <= {
        problem.path for problem in caught.value.problems
    }


@pytest.mark.parametrize("folder", sorted((RECIPES / "drafters").iterdir()), ids=lambda path: path.name)
def test_shipped_drafters_are_small_whole_and_have_a_card(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["kind"] == "compact" and manifest["measured"]["decode"]["prompts"] >= 30
    assert {path.name for path in folder.iterdir()} == {*manifest["files"], "manifest.json"}
    assert all(sha256_file(folder / name) == digest for name, digest in manifest["files"].items())
    assert (folder / "drafter.safetensors").stat().st_size <= 20_000_000
    assert manifest["facts"]["recipe"] in NAMES and "## Measured" in (folder / "README.md").read_text()


@pytest.mark.parametrize("name", ["smollm2-135m", "smollm2-135m-general", "llama-1b"])
def test_options_that_a_recipe_does_not_use_are_no_part_of_its_keys(name: str) -> None:
    """Hours of sampling and training stand under keys made of these parts: an option that is new changes
    them only where it is used."""
    recipe = load_recipe(name)
    sample, train, draft = recipe.sample.identity(), recipe.train.identity(), recipe.draft.identity()
    budget = {"tokens", "samples_per_prompt", "max_new_tokens", "batch_size"}
    assert set(sample) == {"engine", "temperature", *budget}
    assert set(train) == {"loss", "signal", "tokens", "learning_rate", "batch_size", "accumulation"}
    assert set(train["loss"]) == {"name", "eta"}
    assert set(draft) == {"kind", "init", "vocab_size", "revision"}
    assert set(draft["init"]) == {"from", "layers"}
    used = load_recipe(name, ["train.loss.warm_start={share: 0.5}", "train.flat_share=0.5"])
    assert {*used.train.identity()} - {*train} == {"flat_share"}
    assert {*used.train.identity()["loss"]} - {*train["loss"]} == {"warm_start"}


def test_the_serving_block_picks_the_loss_temperature() -> None:
    def temperature(*sets: str) -> float:
        return Run(load_recipe("smoke", sets), Path("runs"), str, ExitStack()).signal_temperature

    assert temperature() == 1  # served at 0
    assert temperature("serving.temperature=0.5", "sample.temperature=[0.5]") == 0.5
    assert temperature("train.signal=live", "train.temperature=2") == 2


@pytest.mark.parametrize("option", ["train.learnable_share=0.4", "train.on_policy={share: 0.25}"])
def test_choices_of_tokens_and_text_are_for_model_drafters(option: str) -> None:
    load_recipe("smoke", [option])
    with pytest.raises(RecipeError, match="drafters of kind model"):
        load_recipe("smoke", [option, "draft.kind=medusa"])
