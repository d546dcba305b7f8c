"""A tracking server that dies mid-run loses nothing, and gets everything later, once."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from mlflow.exceptions import MlflowException

from data.errors import UserError
from distill import tracking
from distill.failover import FOLDER, FailoverClient, unreachable, unsent_store
from distill.sync import sync
from distill.tracking import Tracker
from evaluation.registry import candidates
from evaluation.store import open_client

GONE = MlflowException("API request to http://server failed with exception Connection refused")


class Server:
    """A client whose server can be switched off; it dies by itself before the call named `fatal`."""

    def __init__(self, client: Any) -> None:
        self.client, self.dead, self.fatal = client, False, ""

    def __getattr__(self, name: str) -> Any:
        self.dead = self.dead or name == self.fatal

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.dead:
                raise GONE
            return getattr(self.client, name)(*args, **kwargs)

        return call


@pytest.fixture(scope="module")
def databases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made once for the module: a new database takes seconds."""
    directory = tmp_path_factory.mktemp("server")
    open_client(f"sqlite:///{directory / 'mlflow.db'}").search_experiments()
    shutil.copyfile(directory / "mlflow.db", directory / "empty.db")
    return directory


@pytest.fixture
def runs(databases: Path, tmp_path: Path) -> Path:
    """A runs folder whose local store stands ready, empty."""
    (tmp_path / "runs" / FOLDER).mkdir(parents=True)
    shutil.copyfile(databases / "empty.db", tmp_path / "runs" / FOLDER / "mlflow.db")
    return tmp_path / "runs"


@pytest.fixture
def server(databases: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    uri = f"sqlite:///{databases / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.chdir(databases)  # where this server keeps its artifacts
    made = Server(open_client(uri))
    monkeypatch.setattr(tracking, "_client", lambda uri, runs, name: FailoverClient(made, runs, name))
    return made


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    directory = tmp_path / "drafter"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(os.urandom(64))
    return directory


METRICS = {"speed/speedup": 2.0, "speed/speedup_low": 1.9, "speed/speedup_high": 2.1, "lossless/holds": 1.0}


def whole_run(name: str, runs: Path, drafter: Path, server: Server, dies: str) -> Tracker:
    """A parent with two stages and a candidate; the server dies in between ("train") or before a call."""
    paper = drafter.parent / "evaluation.json"
    paper.write_text("{}")
    with Tracker.start({"a": 1}, name, name, runs) as tracker:
        with tracker.stage("train") as stage:
            stage.log_metrics({"loss": 2.0}, step=1)
            server.dead = dies == "train"
            stage.log_metrics({"loss": 1.0}, step=2)
            stage.log_artifact(paper)
        with tracker.stage("select") as stage:
            server.fatal = dies
            stage.register_candidate(drafter, METRICS, {"loss": "tvd"}, "held-out", "d1", name, [paper])
            assert stage.offline
    return tracker


@pytest.mark.parametrize(
    "dies", ["train", "create_logged_model", "log_model_artifact", "create_model_version"]
)
def test_nothing_is_lost_and_nothing_comes_twice(
    server: Server, drafter: Path, runs: Path, dies: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"dies-{dies}"
    whole_run(name, runs, drafter, server, dies)
    assert "distill sync" in capsys.readouterr().err
    assert (runs / FOLDER / "mlflow.db").exists()
    client = server.client
    server.dead, server.fatal = False, ""
    said: list[str] = []
    assert sync(runs, said.append)["candidates"] == 1
    assert "is now champion" in said[0]
    (row,) = candidates(os.environ["MLFLOW_TRACKING_URI"], [name])
    assert (row.speedup, row.lossless, row.champion, row.loss, row.data_digest) == (
        2.0,
        True,
        True,
        "tvd",
        "d1",
    )
    experiment = client.get_experiment_by_name(name).experiment_id
    found = {run.info.run_name: run for run in client.search_runs([experiment])}
    assert set(found) == {name, "train", "select"} and len(client.search_runs([experiment])) == 3
    assert all(run.info.status == "FINISHED" for run in found.values())
    parent = found[name].info.run_id
    assert all(found[child].data.tags["mlflow.parentRunId"] == parent for child in ("train", "select"))
    points = client.get_metric_history(found["select"].info.run_id, "speed/speedup")
    assert {(point.step, point.value) for point in points} == {(0, 2.0)}
    # A candidate that the server never finished had left its measures there
    assert len(points) == (2 if dies == "create_model_version" else 1)
    history = client.get_metric_history(found["train"].info.run_id, "loss")
    assert [(point.step, point.value) for point in history] == [(1, 2.0), (2, 1.0)]
    assert [file.path for file in client.list_artifacts(found["train"].info.run_id)] == ["evaluation.json"]
    model = client.get_logged_model(row.model_id)
    assert {file.path for file in client.list_logged_model_artifacts(row.model_id)} == {
        "config.json", "model.safetensors", "evaluation"
    } and model.source_run_id == found["select"].info.run_id  # fmt: skip
    assert not (runs / FOLDER).exists()
    assert sync(runs, said.append) == {"runs": 0, "candidates": 0}


def test_an_interrupted_sync_goes_on(
    server: Server, drafter: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole_run("cut", runs, drafter, server, "train")
    server.dead = False

    def gone(*args: Any, **kwargs: Any) -> None:
        raise GONE

    with monkeypatch.context() as patch:
        patch.setattr("mlflow.MlflowClient.create_logged_model", gone)
        with pytest.raises(UserError, match="cannot be reached"):
            sync(runs, lambda text: None)
    kept = open_client(unsent_store(runs))
    experiment = kept.get_experiment_by_name("cut").experiment_id
    assert any("sent" in run.data.tags for run in kept.search_runs([experiment]))
    sync(runs, lambda text: None)
    client = server.client
    again = client.search_runs([client.get_experiment_by_name("cut").experiment_id])
    assert sorted(run.info.run_name for run in again) == ["cut", "select", "train"]
    assert len(candidates(os.environ["MLFLOW_TRACKING_URI"], ["cut"])) == 1


def test_only_a_server_that_is_gone_is_left() -> None:
    assert unreachable(GONE) and unreachable(ConnectionRefusedError())
    assert not unreachable(MlflowException("API request to x", error_code=3))  # a refusal: BAD_REQUEST
    assert not unreachable(MlflowException("No such run")) and not unreachable(ValueError("x"))
