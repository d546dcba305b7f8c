"""Kills at every write point: of a small stage in the normal suite, of the whole pipeline in `make chaos`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from data.files import commit_file, replace_directory, sha256_file, write_atomic, write_json
from distill.stages import Stage, run_stage
from tests import chaos
from tests.chaos import Chaos, plan
from tests.strikes import STRIKES, Session, Writes

ROOT = Path(__file__).resolve().parent.parent


def work(folder: Path) -> None:
    """Writes in every way that a stage may write, and goes on where it stopped."""
    if not (folder / "one.json").exists():
        write_json(folder / "one.json", {"one": 1})
    if not (folder / "drafter").is_dir():
        replace_directory(folder / "drafter", lambda new: (new / "weights").write_text("w" * 100_000))
    if not (folder / "shard.parquet").exists():
        (folder / "shard.tmp").write_text("s" * 1000)
        commit_file(folder / "shard.tmp", folder / "shard.parquet")
    write_atomic(folder / "page.html", "<p>")


def session(root: Path, at: int | None) -> tuple[int, int]:
    """Run the stage in a fork that is killed before its write number `at`; its exit code, and its writes."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        code = 70
        try:
            writes = Writes(str(root), at, lambda: STRIKES["kill"](os.getpid()))
            writes.install()
            run_stage(Stage("sample", root, {}, {}), work, fresh=False, say=lambda text: None)
            os.write(writing, str(writes.count).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as stream:
        count = int(stream.read() or 0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), count


def outputs(root: Path) -> dict[str, str]:
    folder = Stage("sample", root, {}, {}).directory
    manifest = json.loads((folder / "manifest.json").read_text())
    there = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert there == {*manifest["files"], "manifest.json", "inputs.json"}, "something is left over"
    return {name: entry["sha256"] for name, entry in manifest["files"].items()}


def test_a_kill_before_any_write_of_a_stage_loses_nothing(tmp_path: Path) -> None:
    code, count = session(tmp_path / "straight", None)
    assert code == 0 and count > 20, "the hook sees the writes"
    for at in range(count):
        root = tmp_path / f"killed-{at}"
        assert session(root, at)[0] == -9
        assert session(root, None)[0] == 0
        assert outputs(root) == outputs(tmp_path / "straight"), at


def test_a_stage_that_trusts_a_half_written_file_would_be_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def careless(folder: Path) -> None:
        if not (folder / "one.json").exists():
            with (folder / "one.json").open("w") as stream:
                stream.write("half ")
                stream.flush()
                os.fsync(stream.fileno())
                stream.write("whole")

    monkeypatch.setattr(sys.modules[__name__], "work", careless)
    _, count = session(tmp_path / "straight", None)
    differing = 0
    for at in range(count):
        root = tmp_path / f"killed-{at}"
        session(root, at)
        session(root, None)
        differing += outputs(root) != outputs(tmp_path / "straight")
    assert differing


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Chaos:
    """One whose command is a stage that writes an acceptance, and a plot of what the clock decided."""
    (tmp_path / "runs").mkdir()
    calls = iter(range(100))
    made = Chaos(tmp_path, "smoke", 0)

    def run(words: list[str], runs: Path) -> Session:
        folder = runs / "smoke" / "evaluate-0"
        folder.mkdir(parents=True, exist_ok=True)
        commit(folder, {"acceptance.json": "0.5", "plots/positions.csv": str(next(calls))})
        return Session(0, 2, 1.0, "")

    monkeypatch.setattr(chaos, "run", run)
    monkeypatch.setattr(Chaos, "registry_faults", lambda self, stage: iter(()))
    return made


def commit(folder: Path, contents: dict[str, str]) -> None:
    for name, content in contents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
    files = {name: {"sha256": sha256_file(folder / name)} for name in contents}
    write_json(folder / "manifest.json", {"files": files})


def test_measured_outputs_may_differ_from_run_to_run_and_all_others_may_not(workshop: Chaos) -> None:
    assert workshop.learn("evaluate").payload.keys() == {"acceptance.json"}
    folder = workshop.runs / "smoke" / "evaluate-0"
    assert list(workshop.faults("evaluate")) == []
    commit(folder, {"acceptance.json": "0.5", "plots/positions.csv": "other costs"})
    assert list(workshop.faults("evaluate")) == []
    for contents in (
        {"acceptance.json": "0.4"},
        {"acceptance.json": "0.5", "new.json": ""},
        {"plots/x.csv": ""},
    ):
        commit(folder, contents)
        assert any("differs from an undisturbed run" in fault for fault in workshop.faults("evaluate")), (
            contents
        )
    (folder / "plots" / "x.csv").write_text("behind the manifest's back")
    assert any("not what its manifest says" in fault for fault in workshop.faults("evaluate"))


def test_undisturbed_runs_that_differ_end_the_sweep(workshop: Chaos, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos, "MEASURED", {})
    with pytest.raises(AssertionError, match=r"two undisturbed runs of evaluate: plots/positions\.csv"):
        workshop.learn("evaluate")


def test_the_plan_reaches_every_stage_and_kind() -> None:
    import random

    trials = plan(["a", "b"], {"a": 30, "b": 90}, 100, random.Random(0))
    assert {stage for _, stage, _ in trials} == {"a", "b"} and len(trials) >= 100
    assert all(point < {"a": 30, "b": 90}[stage] for _, stage, point in trials)
    kills = [(stage, point) for kind, stage, point in trials if kind == "kill"]
    assert len(set(kills)) == len(kills) > 50


@pytest.mark.slow
def test_the_pipeline_survives_a_short_sweep() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos", "--faults", "10", "--seed", "3"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
