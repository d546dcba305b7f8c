"""The Makefile: every target stands in `make help`, and what the user types stays one argument."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAKEFILE = (ROOT / "Makefile").read_text()

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def make(*arguments: str) -> str:
    # `make test` hands its own flags and level on; without them this is the make that a user starts.
    outside = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    done = subprocess.run(
        ["make", *arguments], cwd=ROOT, capture_output=True, text=True, check=True, env=outside
    )
    return done.stdout


def phony() -> set[str]:
    line = re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    assert line
    return set(line[1].split())


def test_help_lists_every_target_once() -> None:
    listed = re.findall(r"^  ([a-z-]+) +\S", make("help"), re.MULTILINE)
    assert sorted(listed) == sorted(phony())


def test_no_target_prints_help() -> None:
    assert make() == make("help")


@pytest.mark.parametrize("target", sorted(phony() - {"help", "setup"}))
def test_every_target_needs_the_environment_first(target: str) -> None:
    plan = make("-n", "-W", "pyproject.toml", target)
    assert "pip install" in plan
    if target not in ("audit", "openvino", "onnx", "parsers"):  # these make environments of their own
        assert "pip install" not in make("-n", "-o", ".venv/.installed", target)


def test_recipe_and_arguments_reach_the_command() -> None:
    plan = make("-n", "-o", ".venv/.installed", "distill", "RECIPE=x y; z", "ARGS=--set a.b=c")
    assert plan.strip() == '.venv/bin/distill run "$RECIPE" --set a.b=c'


def test_processes_are_named_where_they_are_not_single() -> None:
    for command in ("distill", "train"):
        plan = make("-n", "-o", ".venv/.installed", command, "ACCELERATE=ddp", "ARGS=--fresh")
        name = "run" if command == "distill" else command
        assert plan.strip() == f'.venv/bin/distill {name} "$RECIPE" --accelerate "$ACCELERATE" --fresh'


def test_ui_binds_to_this_machine_only() -> None:
    plan = make("-n", "-o", ".venv/.installed", "ui")
    assert "--host 127.0.0.1" in plan and "0.0.0.0" not in plan


@pytest.mark.parametrize(
    ("pypi", "osv", "code", "said"),
    [
        ("true", "false", 0, "pypi lists no weakness"),
        ("echo gone >&2; false", "true", 0, "osv lists no weakness"),
        ("echo bad 1.0 PYSEC-1 > found.txt; false", "true", 2, "bad 1.0 PYSEC-1"),
        ("echo gone >&2; false", "echo away >&2; false", 2, "NOT AUDITED"),
    ],
)
def test_an_audit_that_finds_or_cannot_look_fails(
    tmp_path: Path, pypi: str, osv: str, code: int, said: str
) -> None:
    scripts = {
        "pip-licenses": "echo MIT",
        "pip-audit": f'case "$2" in pypi) {pypi};; osv) {osv};; esac',
        "python": "echo torch==2.13.0+cpu",
    }
    for name, text in scripts.items():
        script = tmp_path / "bin" / name
        script.parent.mkdir(exist_ok=True)
        script.write_text(f"#!/bin/sh\n{text}\n")
        script.chmod(0o755)
    words = ["make", "-o", ".venv/.installed", "audit", f"AUDIT={tmp_path}", f"BIN={tmp_path / 'bin'}"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == code and said in done.stdout and "MIT" in done.stdout
    assert (tmp_path / "packages.txt").read_text() == "torch==2.13.0\n"


def test_ci_runs_what_it_must() -> None:
    ci = ROOT / ".ci" / "run"
    assert ci.stat().st_mode & 0o111
    lines = [line for line in ci.read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "set -euo pipefail"
    assert lines[-3:] == ["make lint", "make test", "make distill RECIPE=smoke"]
