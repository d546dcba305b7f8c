"""`distill export` with a place of the user's own, from a recipe and from the registry."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from distill import cli
from distill.export.command import commands, report
from evaluation.store import open_client, tracking_uri


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smoke recipe, run up to its candidate."""
    runs = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DISTILL_RUNS", str(runs))
        assert cli.main(["select", "smoke"]) == 0
    return runs


def test_recipe_and_registry_give_the_same_weights_proven(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DISTILL_RUNS", str(runs))
    assert cli.main(["export", "smoke", "--out", str(tmp_path / "a"), "--verify", "--json"]) == 0
    answer = json.loads(capfd.readouterr().out)
    assert answer["verification"]["faults"] == [] and answer["verification"]["same_logits"] is True
    assert json.loads((tmp_path / "a" / "verification.json").read_text()) == answer["verification"]
    assert cli.main(["export", "models:/smoke@champion", "--out", str(tmp_path / "b")]) == 0
    first, second = (json.loads((tmp_path / name / "manifest.json").read_text()) for name in "ab")
    assert first["files"]["model.safetensors"] == second["files"]["model.safetensors"]
    assert second["facts"]["candidate"] == "models:/smoke@champion" and second["facts"]["recipe"] == "smoke"
    assert second["facts"]["run_id"] and second["vocabulary"] == first["vocabulary"]
    assert second["measured"]["decode"]["speedup"]["mean"] > 0
    card = (tmp_path / "b" / "README.md").read_text()
    assert re.search(r"\([\d.]+ to [\d.]+ tokens/s", card)
    # llama.cpp's converter knows no tokenizer of a random target, so nothing promises to start it.
    assert "llama-cpp.sh" not in capfd.readouterr().out
    assert not (tmp_path / "b" / "serve" / "llama-cpp.sh").exists()
    servers = json.loads((tmp_path / "b" / "serve" / "servers.json").read_text())
    assert servers["llama.cpp"].startswith("not served") and servers["vllm"]
    assert cli.main(["export", "models:/smoke@champion", "--out", str(tmp_path / "b")]) == 2
    assert "--force" in capfd.readouterr().err
    assert cli.main(["export", "models:/smoke@champion", "--out", str(tmp_path / "b"), "--force"]) == 0
    # What was measured stands with the candidate: it may have been selected without being evaluated again.
    client = open_client(tracking_uri(runs))
    found = client.search_runs([each.experiment_id for each in client.search_experiments()])
    (evaluated,) = [run.info.run_id for run in found if run.data.tags.get("stage") == "evaluate"]
    client.delete_run(evaluated)
    assert cli.main(["export", "models:/smoke@champion", "--out", str(tmp_path / "c")]) == 0
    third = json.loads((tmp_path / "c" / "manifest.json").read_text())
    assert third["measured"] == second["measured"]


def test_a_recipe_starts_from_a_compact_export(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DISTILL_RUNS", str(runs))
    out = tmp_path / "general"
    assert cli.main(["export", "models:/smoke@champion", "--format", "compact", "--out", str(out)]) == 0
    assert json.loads((out / "manifest.json").read_text())["kind"] == "compact"
    assert "draft: {init: {from: THIS DIRECTORY}}" in (out / "README.md").read_text()
    small = ["sample.tokens=400", "train.tokens=400", f"draft.init.from={out}", "draft.init.layers=null"]
    small.append("evaluate={prompts: 2, num_speculative_tokens: [3], max_new_tokens: 6}")
    capfd.readouterr()
    words = [word for setting in small for word in ("--set", setting)]
    assert cli.main(["evaluate", "smoke", *words, "--json"]) == 0
    evaluation = json.loads(capfd.readouterr().out)["evaluation"]
    raced = {row["drafter"] for row in evaluation["decode"]}
    assert raced == {"model", "adaptive", "before", "ngram"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["models:/smoke@champion"], "--out DIR"),
        (["smoke", "--verify"], "--out DIR"),
        (["smoke", "--format", "gguf"], "--out DIR"),
        (["smoke", "--out", "x", "--fresh"], "--fresh"),
        (["models:/smoke@champion", "--out", "x", "--set", "seed=2"], "--set"),
        (["models:/nobody@champion", "--out", "x"], "no candidate"),
        (["smoke", "--out", "x", "--format", "tflite"], "invalid choice"),
        (["smoke", "--out", "x", "--format", "compact", "--verify"], "--verify"),
        (["smoke", "--out", "x", "--format", "medusa"], "smoke is a drafter of kind model"),
    ],
)
def test_what_does_not_go_together_is_said(
    words: list[str],
    message: str,
    runs: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("DISTILL_RUNS", str(runs))
    assert cli.main(["export", *words]) == 2
    assert message in capfd.readouterr().err


@pytest.mark.parametrize(
    "words", [["--format", "eagle"], ["--format", "compact", "--verify"], ["--out", "/dev/null"]]
)
def test_what_cannot_be_exported_is_said_before_any_work(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DISTILL_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(cli, "_run_stages", lambda *_: pytest.fail("work began"))
    assert cli.main(["export", "smoke", "--out", str(tmp_path / "x"), *words]) == 2
    assert "Traceback" not in capfd.readouterr().err


def test_a_failed_proof_is_said_and_exits_1(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DISTILL_RUNS", str(runs))
    monkeypatch.setattr("distill.export.verify.same_logits", lambda *_: False)
    assert cli.main(["export", "smoke", "--out", str(tmp_path / "a"), "--verify"]) == 3
    assert "NOT PROVEN, the exported drafter's logits" in capfd.readouterr().out


def test_the_commands_fit_what_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert commands(tmp_path, "hf") == []  # no script, no promise
    for folder in (tmp_path, tmp_path / "a b"):
        (folder / "serve").mkdir(parents=True)
        (folder / "serve" / "llama-cpp.sh").write_text("")
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert commands(tmp_path / "a b", "gguf")[0].startswith("PATH=")
    assert "'" in commands(tmp_path / "a b", "gguf")[0]
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    assert commands(tmp_path, "hf")[0] == f"sh {tmp_path}/serve/llama-cpp.sh &"


def test_the_report_names_every_race() -> None:
    race: dict[str, Any] = {
        "accepted": 5,
        "drafted": 10,
        "acceptance_rate": 0.5,
        "identical": 2,
        "prompts": 2,
        "near_ties": 0,
        "speedup": {"mean": 0.7, "low": 0.6, "high": 0.8},
        "plain_tokens_per_second": 10.0,
        "tokens_per_second": 7.0,
    }
    proof = {"faults": [], "races": {"as served": race}, "verdict": "slower"}
    text = report({"directory": "d", "verification": proof, "commands": ["sh x"]})
    assert "as served: accepted 5 of 10" in text and "0.70x" in text and "slower" in text and "sh x" in text
