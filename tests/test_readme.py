"""What the README says can be run can be run, and the tree that it draws is the tree that is there."""

import re
import shlex
from pathlib import Path

import pytest

from distill import cli
from distill.cli import STAGE_COMMANDS
from distill.gate import parse
from distill.processes import read_processes
from distill.recipe import load_recipe

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PACKAGES = ("data", "evaluation", "distill")


def commands() -> list[str]:
    """Every shell line of the README's fenced blocks, and every `make ...` in its text."""
    blocks = re.findall(r"```sh\n(.*?)```", README, flags=re.DOTALL)
    lines = [line.split("#")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line] + re.findall(r"`(make [^`]+)`", README)


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


@pytest.mark.parametrize("command", commands())
def test_a_command_exists_with_its_recipe_and_settings(command: str) -> None:
    words = shlex.split(command)
    assert words[0] == "make" and words[1] in targets(), command
    settings = dict(word.split("=", 1) for word in words[2:])
    recipe = settings.pop("RECIPE", "smollm2-135m")
    settings.pop("CANDIDATE", None)  # a name in the reader's own registry
    read_processes(settings.pop("ACCELERATE", "single"))
    arguments = shlex.split(settings.pop("ARGS", ""))
    assert not settings, f"{command} sets {settings}"
    if words[1] == "export":  # takes a candidate too, and options of its own
        options = cli._parser().parse_args(["export", recipe, *arguments])
        arguments = [word for setting in options.set for word in ("--set", setting)]
        recipe = "x" if recipe.startswith("models:/") else recipe
    if recipe != "x":  # the README's word for any recipe
        load_recipe(recipe, overrides(arguments))


def overrides(arguments: list[str]) -> list[str]:
    pairs = list(zip(arguments[::2], arguments[1::2], strict=True))
    assert {flag for flag, _ in pairs} <= {"--set", "--require"}, arguments
    for flag, value in pairs:
        if flag == "--require":
            parse(value)
    return [value for flag, value in pairs if flag == "--set"]


def test_settings_in_the_text_are_settings_of_a_recipe() -> None:
    for setting in re.findall(r"`--set ([^`]+)`", README):
        if setting != "a.b=c":  # the README's word for any setting
            load_recipe("smollm2-135m", [setting])


def test_no_result_is_left_to_fill_in() -> None:
    assert "RESULTS" not in README and "<!--" not in README


def test_the_two_commands_stand_at_the_top() -> None:
    assert commands()[:2] == ["make distill", "make test"]


def test_the_tree_is_the_tree() -> None:
    tree = README.split("## The tree")[1].split("```")[1]
    drawn: set[str] = set()
    folder = ""
    for line in tree.splitlines():
        names = re.split(r"\s{2,}", line.strip())[0]
        if line and not line.startswith(" "):
            folder = names.split("/")[0]
        elif names:
            drawn |= {f"{folder}/{name.strip()}" for name in names.split(",")}
    missing = {name for name in drawn if not (ROOT / name).exists()}
    assert not missing, f"drawn but not there: {missing}"
    there = {
        f"{package}/{path.name}"
        for package in PACKAGES
        for path in (ROOT / package).glob("*.py")
        if path.name != "__init__.py"
    }
    there |= {f"evaluation/decoder/{path.name}" for path in (ROOT / "evaluation/decoder").glob("[a-z]*.py")}
    assert there <= drawn, f"there but not drawn: {there - drawn}"


def test_every_stage_has_a_target_and_a_row() -> None:
    for stage in STAGE_COMMANDS:
        assert stage == "run" or stage in targets()
        assert stage == "run" or f"| {stage} |" in README
