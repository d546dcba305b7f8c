"""A real MLflow server over HTTP, and its own pages in a real browser (`pytest -m slow`).

The server dies while the smoke recipe trains; the run ends here, `distill sync` sends the rest once the
server is back, and another machine exports from its registry alone. Then a second drafter is trained beside
it, and MLflow's comparison shows both.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from data.errors import UserError
from data.files import sha256_file
from distill import cli, pipeline
from distill.candidates import drafter_digest
from distill.failover import unsent_store
from distill.recipe import load_recipe
from distill.sync import sync
from distill.tracking import Tracker
from evaluation.measures import HEADLINE, candidate_metrics
from evaluation.registry import candidates
from evaluation.store import open_client
from tests.distill.test_pipeline import SMALL
from tests.evaluation.test_report import BROWSER

pytestmark = pytest.mark.slow
STAGES = ("sample", "train", "evaluate", "select", "export")


@dataclass
class Server:
    """`mlflow server` on a port of this machine; it keeps database and artifacts in `folder`."""

    folder: Path
    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        store = ["--backend-store-uri", f"sqlite:///{self.folder / 'mlflow.db'}"]
        store += ["--artifacts-destination", str(self.folder / "artifacts")]
        place = ["--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", *place, *store],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
        )
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{self.uri}/health", timeout=1).close()
                return
            except OSError:
                assert self.process.poll() is None, "the server ended"
                time.sleep(0.2)
        raise AssertionError("the server does not answer")

    def kill(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)  # its workers too
            self.process.wait()
            self.process = None


@dataclass
class Story:
    """What happened, for the tests to look at."""

    server: Server
    runs: Path
    result: pipeline.Result
    selection: dict[str, Any]
    """What the select stage wrote while the server was gone."""
    refused: str = ""
    sent: list[dict[str, int]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    folder = tmp_path_factory.mktemp("server")
    server = Server(folder, free_port())
    runs = folder / "runs"
    real_train = pipeline.WORK["train"]

    def train(run: Any, directory: Path, tracker: Any) -> Any:
        tracker.log_metrics({"while_it_lived": 1.0})
        server.kill()
        return real_train(run, directory, tracker)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", server.uri)
        patch.setenv("DISTILL_RUNS", str(runs))
        assert cli.main(["run", "smoke"]) == 2 and not (runs / "smoke").exists()
        try:
            server.start()
            with pytest.MonkeyPatch.context() as dying:
                dying.setitem(pipeline.WORK, "train", train)
                result = pipeline.run(
                    load_recipe("smoke", SMALL), runs, "run", fresh=False, say=lambda text: None
                )
            told = Story(server, runs, result, result.read("select", "selection.json") or {})
            with pytest.raises(UserError) as refused:
                sync(runs, told.said.append)
            told.refused = str(refused.value)
            server.start()
            told.sent = [sync(runs, told.said.append) for _ in range(2)]
            yield told
        finally:
            server.kill()


def files(client: Any, run_id: str, folder: str | None = None) -> set[str]:
    """Every artifact of a run, however deep."""
    found = client.list_artifacts(run_id, folder)
    deeper = [files(client, run_id, each.path) for each in found if each.is_dir]
    return {each.path for each in found if not each.is_dir}.union(*deeper)


def runs_of(client: Any, story: Story) -> dict[str, list[Any]]:
    """The server's runs by name."""
    (experiment,) = [each for each in client.search_experiments() if each.name != "Default"]
    found: dict[str, list[Any]] = {}
    for run in client.search_runs([experiment.experiment_id]):
        found.setdefault(run.info.run_name, []).append(run)
    return found


def test_a_run_whose_server_died_ended_here_and_kept_what_was_not_sent(story: Story) -> None:
    assert set(story.result.outcomes) == set(STAGES)
    assert "distill sync" in story.selection["reason"]
    assert "cannot be reached" in story.refused
    assert story.sent[0]["candidates"] == 1 and story.sent[1] == {"runs": 0, "candidates": 0}
    assert any("version 1 is now champion" in text for text in story.said)
    assert not (story.runs / "unsent").exists()


def test_the_server_has_every_run_measure_and_file_once(story: Story, tmp_path: Path) -> None:
    client = open_client(story.server.uri)
    found = {name: runs[0] for name, runs in runs_of(client, story).items() if len(runs) == 1}
    assert set(found) == {"smoke", *STAGES}
    assert all(run.info.status == "FINISHED" for run in found.values())
    parent = found["smoke"].info.run_id
    assert all(found[name].data.tags["mlflow.parentRunId"] == parent for name in STAGES)
    for name, run in found.items():
        for key in run.data.metrics:
            if key.startswith("system/"):
                continue
            steps = [point.step for point in client.get_metric_history(run.info.run_id, key)]
            assert len(set(steps)) == len(steps), (name, key)
    assert {"while_it_lived", "train/loss"} <= set(found["train"].data.metrics)
    evaluated = story.result.outcomes["evaluate"].stage.directory
    kept = {f"{path.parent.name}/{path.name}" for path in evaluated.glob("[pt]*/*")}
    assert "tables/speed.csv" in kept and "plots/speedup.png" in kept
    run_id = found["evaluate"].info.run_id
    assert files(client, run_id) == {"evaluation.json", "report.html", *kept}
    for name in ("evaluation.json", "plots/speedup.png"):
        assert sha256_file(Path(client.download_artifacts(run_id, name, str(tmp_path)))) == sha256_file(
            evaluated / name
        )
    (dataset,) = found["select"].inputs.dataset_inputs
    evaluation = story.result.read("evaluate", "evaluation.json")
    assert evaluation is not None and dataset.dataset.digest == evaluation["data_digest"]
    assert found["smoke"].data.metrics["speed/speedup"] == evaluation["best"]["speedup"]["mean"]


def test_another_machine_exports_from_the_registry_alone(
    story: Story, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", story.server.uri)
    monkeypatch.setenv("DISTILL_RUNS", str(tmp_path / "elsewhere"))
    assert cli.main(["export", "models:/smoke@champion", "--out", str(tmp_path / "out")]) == 0
    (row,) = candidates(story.server.uri)
    trained = story.result.outcomes["train"].stage.directory / "drafter"
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (trained, tmp_path / "out"))
    ids = json.loads((trained / "draft_vocab.json").read_text())
    theirs["lm_head.weight"] = theirs["lm_head.weight"][ids]  # servers want a row for every id
    assert set(ours) == set(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert row.drafter_digest == drafter_digest(trained) and row.champion and row.lossless
    assert cli.main(["export", "models:/smoke@nobody", "--out", str(tmp_path / "none")]) == 2


@pytest.mark.parametrize("harm", ["deleted", "overwritten"])
def test_a_server_that_loses_its_database_is_one_that_is_gone(
    harm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, runs, database = Server(tmp_path, free_port()), tmp_path / "runs", tmp_path / "mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    try:
        server.start()
        with Tracker.start({"a": 1}, "broken", "target", runs) as tracker:
            tracker.log_metrics({"loss": 2.0})
            assert not tracker.offline
            if harm == "deleted":
                database.unlink()
            else:
                database.write_bytes(b"rubbish!" * (database.stat().st_size // 8))
            tracker.log_metrics({"loss": 1.0}, step=1)
            assert tracker.offline
    finally:
        server.kill()
    kept = open_client(unsent_store(runs))
    (run,) = kept.search_runs([kept.get_experiment_by_name("target").experiment_id])
    assert run.data.metrics["loss"] == 1.0 and run.info.status == "FINISHED"


def look(server: Server, place: str, profile: Path) -> str:
    """The text of one of MLflow's pages, once its scripts have drawn it."""
    assert BROWSER is not None
    browser = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
    options = ["--window-size=9000,3000", "--virtual-time-budget=20000", "--dump-dom"]
    done = subprocess.run(
        [*browser, *options, f"{server.uri}/#/{place}"], capture_output=True, timeout=180, check=True
    )
    text = re.sub(r"<(script|style)[^>]*>.*?</\1>", "", done.stdout.decode(), flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]+>", " ", text).split())


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_mlflows_own_pages_compare_our_drafters(
    story: Story, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", story.server.uri)
    monkeypatch.setenv("DISTILL_RUNS", str(story.runs))
    changes = [*SMALL, "train.loss.name=tvd"]
    assert (
        cli.main(["run", "smoke", *(word for change in changes for word in ("--set", change)), "--json"]) == 0
    )
    second = json.loads(capfd.readouterr().out)["evaluation"]
    first = story.result.read("evaluate", "evaluation.json")
    assert first is not None
    by_loss = [{key: candidate_metrics(each)[key] for key in HEADLINE} for each in (first, second)]
    client = open_client(story.server.uri)
    parents = sorted(runs_of(client, story)["smoke"], key=lambda run: run.info.start_time)
    assert [run.data.params["train.loss.name"] for run in parents] == ["forward_kl", "tvd"]
    experiment = parents[0].info.experiment_id

    def compare(*run_ids: str) -> str:
        named = ",".join(f"%22{run_id}%22" for run_id in run_ids)
        return look(story.server, f"compare-runs?runs=[{named}]&experiments=[%22{experiment}%22]", tmp_path)

    def shown(value: float) -> str:
        return f"{round(value, 3):g}"  # as the page rounds

    page = compare(*(run.info.run_id for run in parents))
    assert "Comparing 2 Runs" in page and "train.loss.name forward_kl tvd" in page
    for name in ("speed/speedup", "acceptance/sampled", "lossless/holds"):
        assert name in page
    small = [key for key in HEADLINE if max(each[key] for each in by_loss) < 10]  # others it rounds coarser
    differing = [key for key in small if shown(by_loss[0][key]) != shown(by_loss[1][key])]
    assert "speed/speedup" in differing
    pairs = {key: f"{shown(by_loss[0][key])} {shown(by_loss[1][key])}" for key in differing}
    assert [key for key, pair in pairs.items() if pair not in page] == []
    child = runs_of(client, story)["train"][0].info.run_id
    control = compare(parents[0].info.run_id, child)
    assert "Comparing 2 Runs" in control and "tvd" not in control
    assert pairs["speed/speedup"] not in control

    models = look(story.server, f"experiments/{experiment}/models", tmp_path)
    assert first["data_digest"] in models and models.count("Ready") == 2
    values = [str(each["acceptance/sampled"]) for each in by_loss]
    assert values[0] != values[1] and all(value in models for value in values)
    nothing = look(story.server, "experiments/0/models", tmp_path)
    assert "Ready" not in nothing and values[0] not in nothing


def test_the_recipe_goes_on_from_what_was_sent(
    story: Story, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", story.server.uri)
    monkeypatch.setenv("DISTILL_RUNS", str(story.runs))
    changes = [word for change in SMALL for word in ("--set", change)]
    assert cli.main(["export", "smoke", *changes, "--out", str(tmp_path / "out")]) == 0
    exported = json.loads((tmp_path / "out" / "manifest.json").read_text())
    (sent,) = [
        row for row in candidates(story.server.uri) if row.version == "1"
    ]  # the second may be champion
    assert exported["facts"]["model_id"] == sent.model_id != story.selection["model_id"]
