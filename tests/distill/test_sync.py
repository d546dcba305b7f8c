"""A tracking server that dies mid-run loses nothing, and gets everything later, once."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from mlflow.exceptions import MlflowException

from data.errors import UserError
from data.files import write_json
from distill import tracking
from distill.failover import FOLDER, FailoverClient, unreachable, unsent_store
from distill.pipeline import decide
from distill.stages import recipe_lock
from distill.sync import sync
from distill.tracking import Candidate, Tracker
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
    with Tracker.start({"a": 1}, name, f"{name}!", runs) as tracker:
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
    kept = open_client(unsent_store(runs))
    here = [kept.get_experiment_by_name(name).experiment_id]
    ended = {run.info.run_name: run.info.end_time for run in kept.search_runs(here)}
    (measured_at,) = {
        metric.timestamp for model in kept.search_logged_models(here) for metric in model.metrics
    }
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
    assert set(ended) >= {name, "select"}
    assert ended == {key: found[key].info.end_time for key in ended}
    assert row.measured_at == measured_at  # not the time of sending
    # The target's name, not its experiment's: later candidates belong to the same registered model
    assert client.get_registered_model(name).tags["target"] == f"{name}!"
    parent = found[name].info.run_id
    assert all(found[child].data.tags["mlflow.parentRunId"] == parent for child in ("train", "select"))
    points = client.get_metric_history(found["select"].info.run_id, "speed/speedup")
    assert {(point.step, point.value) for point in points} == {(0, 2.0)}
    assert len(points) == 1  # also where a candidate that the server never finished had left them
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


def test_a_server_may_die_twice(server: Server, drafter: Path, runs: Path) -> None:
    for name in ("once", "twice"):  # the store of the first time was deleted
        whole_run(name, runs, drafter, server, "train")
        server.dead = False
        assert sync(runs, lambda text: None)["candidates"] == 1
    assert len(candidates(os.environ["MLFLOW_TRACKING_URI"], ["once", "twice"])) == 2


@pytest.mark.parametrize("dies", ["search_registered_models", "set_registered_model_alias"])
def test_a_server_that_dies_while_the_champion_is_decided(
    server: Server, drafter: Path, runs: Path, dies: str
) -> None:
    name = f"decides-{dies}"
    with Tracker.start({"a": 1}, name, name, runs) as tracker, tracker.stage("select") as stage:

        def register() -> Candidate:
            return stage.register_candidate(drafter, METRICS, {}, "held-out", "d1", name, key=name)

        server.fatal = dies
        decision = decide(stage, name, register)
    assert not decision.promoted and "distill sync" in decision.reason
    server.dead, server.fatal = False, ""
    said: list[str] = []
    assert sync(runs, said.append)["candidates"] == 1 and "is now champion" in said[0]
    (row,) = candidates(os.environ["MLFLOW_TRACKING_URI"], [name])
    assert row.champion and row.model_id == decision.model_id


def test_nothing_is_sent_while_a_recipe_may_add_to_it(server: Server, runs: Path) -> None:
    with recipe_lock(runs / "busy"):
        with pytest.raises(UserError, match=f"busy runs \\(process {os.getpid()}\\)"):
            sync(runs, lambda text: None)
    assert (runs / FOLDER / "mlflow.db").exists()
    assert sync(runs, lambda text: None) == {"runs": 0, "candidates": 0}
    assert not (runs / FOLDER).exists()


def test_a_decision_on_a_candidate_kept_here_is_made_again(server: Server, drafter: Path, runs: Path) -> None:
    whole_run("forgotten", runs, drafter, server, "train")
    server.dead = False
    kept = open_client(unsent_store(runs))
    experiment = kept.get_experiment_by_name("forgotten").experiment_id
    (model,) = kept.search_logged_models([experiment])
    for folder, model_id in (("select-1", model.model_id), ("select-2", "m-other")):
        write_json(runs / "forgotten" / folder / "selection.json", {"model_id": model_id})
    sync(runs, lambda text: None)
    assert [path.name for path in (runs / "forgotten").iterdir()] == ["select-2"]


def test_only_a_server_that_is_gone_is_left() -> None:
    assert unreachable(MlflowException("BAD_REQUEST: file is not a database", error_code=3))
    assert unreachable(GONE) and unreachable(ConnectionRefusedError())
    assert not unreachable(MlflowException("API request to x", error_code=3))  # a refusal: BAD_REQUEST
    assert not unreachable(MlflowException("No such run")) and not unreachable(ValueError("x"))
