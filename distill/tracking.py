"""MLflow: an experiment per target, a run per recipe run with a child per stage, a LoggedModel per drafter.

The store is SQLite at `RUNS/mlflow.db` with artifacts under `RUNS/mlartifacts`, unless MLFLOW_TRACKING_URI
names another. Only the client API is used: MLflow's global tracking URI and active run are never touched,
so several trackers live side by side. A candidate's LoggedModel holds the drafter's weights, thus the
registry alone is enough to export or to train on. Nothing is pickled and `mlflow.pyfunc` is never imported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from data.errors import UserError
from distill.candidates import drafter_digest, drafter_files
from distill.redact import MAX_VALUE, flatten, redact, redacted, safe_name
from evaluation.registry import MODEL_TYPE
from evaluation.store import find_or_make_experiment, open_client, server_fault, tracking_uri

if TYPE_CHECKING:
    from mlflow import MlflowClient

_PARAMS_PER_REQUEST = 100
METRICS_PER_REQUEST = 1000
_DIGEST_LENGTH = 36  # MLflow's limit for a data set's digest
_TEXT_SUFFIXES = {".json", ".yaml", ".yml", ".txt", ".md", ".csv", ".log"}


@dataclass(frozen=True)
class Candidate:
    """A registered drafter: `models:/MODEL_ID`, and the version under its registered model's name."""

    model_id: str
    version: str


@dataclass
class Tracker:
    """One MLflow run: the parent of a recipe run, or (by `stage`) the child of one stage.

    As a context manager it ends its run: FINISHED, FAILED on an error, KILLED on an interrupt or a
    SystemExit. A candidate registered in a run that does not finish is withdrawn, so that it never stands
    as READY.
    """

    client: MlflowClient
    run_id: str
    experiment_id: str
    recipe_name: str
    target_name: str
    place: str = ""
    """The machine and folder of a recipe's runs, which only one process at a time may add to."""
    _candidates: list[tuple[str, Candidate]] = field(default_factory=list)

    @classmethod
    def start(
        cls,
        recipe_resolved: Mapping[str, Any],
        recipe_name: str,
        target_name: str,
        runs_dir: Path,
        place: str = "",
    ) -> Tracker:
        """Open the store (made on first use), the target's experiment and a parent run with the recipe in it.

        Raises `UserError` when the store cannot be opened or the experiment was deleted.
        """
        from mlflow.exceptions import MlflowException

        uri = tracking_uri(runs_dir)
        local = uri.startswith("sqlite:///")
        if local:
            Path(runs_dir).mkdir(parents=True, exist_ok=True)
        artifacts = (Path(runs_dir).resolve() / "mlartifacts").as_uri() if local else None
        try:
            client = _client(uri, runs_dir, safe_name(target_name))
            experiment_id = find_or_make_experiment(client, safe_name(target_name), artifacts)
            tags = {"recipe": recipe_name, "place": place}
            run = client.create_run(experiment_id, run_name=recipe_name, tags=tags)
        except MlflowException as error:
            said = server_fault(error) or redact(str(error))
            raise UserError(
                f"MLflow at {redact(uri)} (MLFLOW_TRACKING_URI) cannot be used: {said}"
            ) from error
        tracker = cls(client, run.info.run_id, experiment_id, recipe_name, target_name, place)
        with contextlib.ExitStack() as failed:
            failed.push(tracker)
            tracker.log_params(recipe_resolved)
            client.log_dict(tracker.run_id, redacted(recipe_resolved), "recipe.json")
            failed.pop_all()
        return tracker

    @property
    def offline(self) -> bool:
        """Is MLflow's server gone, and what is logged kept for `distill sync`?"""
        return bool(getattr(self.client, "offline", False))

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.client.set_terminated(self.run_id, "FINISHED")
            return
        # First what matters most: a second interrupt may end this clean-up early.
        for model_name, candidate in self._candidates:
            self.client.finalize_logged_model(candidate.model_id, "FAILED")
            self.client.delete_model_version(model_name, candidate.version)
        interrupted = isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit))
        self.client.set_tag(self.run_id, "error", redact(f"{type(error).__name__}: {error}")[:MAX_VALUE])
        self.client.set_terminated(self.run_id, "KILLED" if interrupted else "FAILED")

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[Tracker]:
        """A child run for one stage; its status follows how the block ends."""
        tags = {"recipe": self.recipe_name, "place": self.place, "stage": name}
        tags["mlflow.parentRunId"] = self.run_id
        run = self.client.create_run(self.experiment_id, run_name=name, tags=tags)
        child = dataclasses.replace(self, run_id=run.info.run_id, _candidates=[])
        with child:
            yield child

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Log nested parameters flat. MLflow keeps the first value of a name: another one later is an
        error.
        """
        from mlflow.entities import Param

        entries = [Param(key, value) for key, value in flatten(params).items()]
        for start in range(0, len(entries), _PARAMS_PER_REQUEST):
            self.client.log_batch(self.run_id, params=entries[start : start + _PARAMS_PER_REQUEST])

    def log_metrics(self, metrics: Mapping[str, float | None], step: int | None = None) -> None:
        """Log numbers at `step` (0 by default); None, NaN and infinities are left out, for SQL would change
        them.
        """
        self._log(metrics, step or 0, _now())

    def log_artifact(self, path: Path, folder: str | None = None) -> None:
        """Upload a file, or a directory with everything in it, under `folder`; secrets in text files are
        cut out.
        """
        path = Path(path)
        if path.is_dir():
            for child in sorted(path.iterdir()):
                self.log_artifact(child, f"{folder}/{path.name}" if folder else path.name)
            return
        text = path.read_text("utf-8", "replace") if path.suffix in _TEXT_SUFFIXES else ""
        if redact(text) == text:
            self.client.log_artifact(self.run_id, str(path), folder)
            return
        with tempfile.TemporaryDirectory() as scratch:
            copy = Path(scratch) / path.name
            copy.write_text(redact(text), "utf-8")
            self.client.log_artifact(self.run_id, str(copy), folder)

    def model_name(self) -> str:
        """The registered model for this (target, recipe).

        A champion is the fastest *for a workload*: speedups of one target on structured output and on chat
        do not compare, so a name per target would crown whichever workload is easier. It is the recipe's
        name, unless that name already stands for another target (`--set target.model=...`): then the
        target's name is appended.
        """
        from mlflow.exceptions import MlflowException

        name = safe_name(self.recipe_name)
        try:
            owner = self.client.get_registered_model(name).tags.get("target")
        except MlflowException:
            owner = None
        return name if owner in (None, self.target_name) else f"{name}--{safe_name(self.target_name)}"[:200]

    def register_candidate(
        self,
        drafter_dir: Path,
        metrics: Mapping[str, float],
        params: Mapping[str, Any],
        dataset_name: str,
        dataset_digest: str,
        model_name: str,
        papers: Sequence[Path] = (),
        key: str = "",
        measured_at: int | None = None,
    ) -> Candidate:
        """Store a drafter's files and measures as a LoggedModel of this run, and register it as a new
        version. `papers`, such as its evaluation with the certificate, stand beside the weights in
        `evaluation/`. `key` tells what is registered apart: where a process that was killed had registered
        the same, its candidate is taken over, or withdrawn where it was half registered. `measured_at`: now.

        READY is set last: whatever fails or is interrupted before leaves a FAILED or PENDING model, which
        neither `compare` nor `resolve_candidate` accepts. Raises `UserError` when `drafter_dir` is no
        safetensors drafter.
        """
        if key and (earlier := self._earlier(key, model_name)):
            self._candidates.append((model_name, earlier))
            return earlier
        online = not self.offline
        measured_at = measured_at or _now()
        given = (drafter_dir, metrics, params, dataset_name, dataset_digest, model_name, papers, key)
        try:
            return self._register(*given, measured_at)
        except Exception:
            if not (online and self.offline):
                raise
            # The server died in between: begin again, in the local store.
            return self._register(*given, measured_at)

    def _register(
        self,
        drafter_dir: Path,
        metrics: Mapping[str, float],
        params: Mapping[str, Any],
        dataset_name: str,
        dataset_digest: str,
        model_name: str,
        papers: Sequence[Path],
        key: str,
        measured_at: int,
    ) -> Candidate:
        from mlflow.exceptions import MlflowException

        files = drafter_files(drafter_dir)
        model = self.client.create_logged_model(
            self.experiment_id,
            name=safe_name(model_name),
            source_run_id=self.run_id,
            tags={"drafter_digest": drafter_digest(drafter_dir), "key": key},
            params=flatten(params),
            model_type=MODEL_TYPE,
        )
        try:
            for file in files:
                self.client.log_model_artifact(model.model_id, str(file))
            for paper in papers:
                self.client.log_model_artifact(model.model_id, str(paper), "evaluation")
            dataset = {"dataset_name": dataset_name, "dataset_digest": dataset_digest[:_DIGEST_LENGTH]}
            self._log(metrics, 0, measured_at, model_id=model.model_id, **dataset)
            self._link(model.model_id, dataset_name, dataset_digest[:_DIGEST_LENGTH])
            version = self._new_version(model_name, model)
            self.client.finalize_logged_model(model.model_id, "READY")
        except BaseException:
            with contextlib.suppress(MlflowException):  # a model on a server that is gone
                self.client.finalize_logged_model(model.model_id, "FAILED")
            raise
        candidate = Candidate(model.model_id, version)
        self._candidates.append((model_name, candidate))
        return candidate

    def _earlier(self, key: str, model_name: str) -> Candidate | None:
        """The whole candidate with this key; what is left of half registered ones is withdrawn."""
        whole = None
        versions = {
            version.tags.get("model_id"): str(version.version)
            for version in self.client.search_model_versions(f"name = '{model_name}'")
        }
        models = self.client.search_logged_models([self.experiment_id], filter_string=f"tags.key = '{key}'")
        for model in models:
            version = versions.get(model.model_id)
            if str(model.status) == "READY" and version is not None:
                whole = Candidate(model.model_id, version)
                continue
            self.client.finalize_logged_model(model.model_id, "FAILED")
            if version is not None:
                self.client.delete_model_version(model_name, version)
        return whole

    def _log(self, metrics: Mapping[str, float | None], step: int, at: int, **of: str) -> None:
        from mlflow.entities import Metric

        entries = [
            Metric(key, float(value), at, step, **of)
            for key, value in metrics.items()
            if value is not None and math.isfinite(value)
        ]
        for start in range(0, len(entries), METRICS_PER_REQUEST):
            self.client.log_batch(self.run_id, metrics=entries[start : start + METRICS_PER_REQUEST])

    def _link(self, model_id: str, dataset_name: str, dataset_digest: str) -> None:
        """Show the data set as the run's input and the model as its output in MLflow's pages."""
        from mlflow.entities import Dataset, DatasetInput, LoggedModelOutput

        dataset = Dataset(dataset_name, dataset_digest, source_type="local", source=dataset_name)
        self.client.log_inputs(self.run_id, [DatasetInput(dataset)])
        self.client.log_outputs(self.run_id, [LoggedModelOutput(model_id=model_id, step=0)])

    def _new_version(self, model_name: str, model: Any) -> str:
        from mlflow.exceptions import MlflowException

        try:
            self.client.create_registered_model(model_name, tags={"target": self.target_name})
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        # The SQL store keeps no model id with a version, and resolves models:/ID sources through the global
        # tracking URI: hence the tag, and the artifact location as source.
        version = self.client.create_model_version(
            model_name,
            model.artifact_location,
            run_id=self.run_id,
            tags={"model_id": model.model_id},
            model_id=model.model_id,
        )
        return str(version.version)


def _now() -> int:
    """As MLflow counts time: milliseconds since 1970."""
    return int(time.time() * 1000)


def end_killed(runs_dir: Path, recipe_name: str, target_name: str, place: str) -> None:
    """End as KILLED what a process that was killed, or had no disk left, left open: nobody else works on the
    recipe at `place` now.

    Where there is no store, or its server cannot be reached, nothing is done: this can wait.
    """
    from mlflow.exceptions import MlflowException

    uri = tracking_uri(runs_dir)
    if uri.startswith("sqlite:///") and not Path(uri.removeprefix("sqlite:///")).exists():
        return
    client = open_client(uri)
    with contextlib.suppress(MlflowException):
        experiment = client.get_experiment_by_name(safe_name(target_name))
        if experiment is not None:
            _end_runs(client, experiment.experiment_id, recipe_name, place)


def _end_runs(client: MlflowClient, experiment_id: str, recipe_name: str, place: str) -> None:
    mine = f"tags.recipe = '{recipe_name}' and tags.place = '{place}' and attributes.status = 'RUNNING'"
    for run in client.search_runs([experiment_id], mine):
        client.set_tag(run.info.run_id, "error", "its process ended without a word")
        client.set_terminated(run.info.run_id, "KILLED")


def _client(uri: str, runs_dir: Path, experiment: str) -> MlflowClient:
    """A client for `uri`; one of a server goes on with a local store where the server dies."""
    from distill.failover import FailoverClient

    client = open_client(uri)
    if not uri.startswith(("http://", "https://")):
        return client
    return cast("MlflowClient", FailoverClient(client, runs_dir, experiment))
