"""The house keeps its shape: imports run downwards, and the front door stays light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLOORS = ("data", "evaluation", "distill")
HEAVY = {
    "torch",
    "transformers",
    "trl",
    "datasets",
    "mlflow",
    "accelerate",
    "pandas",
    "pyarrow",
    "matplotlib",
}
FRONT_DOOR = (
    "data.errors",
    "data.files",
    "data.prompts",
    "data.sample",
    "distill.cli",
    "distill.drafter",
    "distill.export",
    "distill.models",
    "distill.pipeline",
    "distill.preflight",
    "distill.recipe",
    "distill.resolve",
    "distill.stages",
    "distill.train",
    "evaluation.evaluate",
)


def imported_floors(source: str) -> set[str]:
    """Our packages that a module imports anywhere in it, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module.split(".")[0])
    return found & {*FLOORS, "tests"}


def upward(floor: str, source: str) -> set[str]:
    return imported_floors(source) - set(FLOORS[: FLOORS.index(floor) + 1])


@pytest.mark.parametrize("floor", FLOORS)
def test_imports_run_downwards(floor: str) -> None:
    modules = list((ROOT / floor).rglob("*.py"))
    assert modules
    wrong = {
        str(path.relative_to(ROOT)): found for path in modules if (found := upward(floor, path.read_text()))
    }
    assert not wrong


def test_upward_imports_would_be_seen() -> None:
    assert upward("data", "def f():\n    from evaluation.speed import race") == {"evaluation"}
    assert upward("evaluation", "import distill.models, data.files") == {"distill"}
    assert upward("distill", "from data import files\nfrom evaluation import speed\nimport torch") == set()


def test_relative_imports_are_not_used() -> None:
    """They would slip past the check above."""
    for floor in FLOORS:
        for path in (ROOT / floor).rglob("*.py"):
            nodes = ast.walk(ast.parse(path.read_text()))
            assert not [node for node in nodes if isinstance(node, ast.ImportFrom) and node.level], path


def test_packages_are_listed() -> None:
    import tomllib

    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for floor in FLOORS
        for path in (ROOT / floor).rglob("__init__.py")
    }
    assert sorted(found) == sorted(listed)


@pytest.mark.parametrize("module", FRONT_DOOR)
def test_front_door_imports_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(*sorted({HEAVY!r} & set(sys.modules)))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert loaded.stdout.split() == []
