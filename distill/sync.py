"""`distill sync`: send what was kept locally while MLflow's server was gone (`distill.failover`)."""

import dataclasses
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.errors import UserError
from distill.failover import CONTINUES, FOLDER, unsent_store
from distill.result import read_json
from distill.stages import Say, holder

if TYPE_CHECKING:
    from mlflow import MlflowClient

SENT = "sent"
"""Tag of a local run that is on the server, so that an interrupted `sync` sends none twice."""


def sync(runs_dir: Path, say: Say) -> dict[str, int]:
    """Send every kept run with its parameters, measures, files and candidates, then drop the local store.

    Raises `UserError` where the server still cannot be reached, or a recipe runs that may add to what is
    kept; what was not sent stays.
    """
    from mlflow.exceptions import MlflowException

    from distill.redact import redact
    from evaluation.store import open_client, tracking_uri

    sent = {"runs": 0, "candidates": 0}
    if not (runs_dir / FOLDER / "mlflow.db").exists():
        return sent
    if tracking_uri(runs_dir) == unsent_store(runs_dir):
        raise UserError("MLFLOW_TRACKING_URI names the store of what is not sent: name the server.")
    for lock in sorted(runs_dir.glob("*/.lock")):
        if process := holder(lock.parent):
            raise UserError(
                f"recipe {lock.parent.name} runs (process {process}) and may add to what is not sent: "
                "run `distill sync` once it has ended"
            )
    local, server = open_client(unsent_store(runs_dir)), open_client(tracking_uri(runs_dir))
    try:
        for experiment in local.search_experiments(filter_string="name != 'Default'"):
            runs = local.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"])
            for run in sorted(runs, key=lambda run: "mlflow.parentRunId" in run.data.tags):
                if SENT not in run.data.tags:
                    models = _send(local, server, experiment.name, run, say)
                    _forget(runs_dir, models)
                    sent["candidates"] += len(models)
                    sent["runs"] += 1
    except MlflowException as error:
        raise UserError(f"MLflow cannot be reached or refused: {redact(str(error))}") from error
    shutil.rmtree(runs_dir / FOLDER)
    return sent


def _send(local: "MlflowClient", server: "MlflowClient", experiment: str, run: Any, say: Say) -> list[str]:
    """One run, onto the one that it continues or as a new one; the ids that its candidates had here."""
    from mlflow.entities import Metric

    from distill.tracking import METRICS_PER_REQUEST, Tracker
    from evaluation.store import find_or_make_experiment

    tags, run_id = run.data.tags, run.info.run_id
    experiment_id = find_or_make_experiment(server, experiment, None)
    target = tags.get(CONTINUES)
    if target is None:
        kept = {key: value for key, value in tags.items() if key != "mlflow.parentRunId"}
        if parent := tags.get("mlflow.parentRunId"):
            kept["mlflow.parentRunId"] = local.get_run(parent).data.tags[SENT]
        made = server.create_run(experiment_id, run.info.start_time, kept, run.info.run_name)
        target = str(made.info.run_id)
        local.set_tag(run_id, CONTINUES, target)  # where this is interrupted, the next `sync` goes on with it
    tracker = Tracker(server, target, experiment_id, tags.get("recipe", ""), experiment)
    tracker.log_params(run.data.params)
    models = local.search_logged_models([run.info.experiment_id])
    own = [model for model in models if model.source_run_id == run_id and str(model.status) == "READY"]
    with_model = {metric.key for model in own for metric in model.metrics or []}
    points = [
        Metric(name, point.value, point.timestamp, point.step)
        for name in run.data.metrics
        if name not in with_model  # which its candidate brings along
        for point in local.get_metric_history(run_id, name)
    ]
    for start in range(0, len(points), METRICS_PER_REQUEST):
        server.log_batch(target, metrics=points[start : start + METRICS_PER_REQUEST])
    if "error" in tags:
        server.set_tag(target, "error", tags["error"])
    with tempfile.TemporaryDirectory() as scratch:
        for file in local.list_artifacts(run_id):
            tracker.log_artifact(Path(local.download_artifacts(run_id, file.path, scratch)))
    for model in own:
        _send_candidate(local, tracker, model, say)
    server.set_terminated(target, run.info.status, run.info.end_time)
    local.set_tag(run_id, SENT, target)
    return [model.model_id for model in own]


def _forget(runs_dir: Path, models: list[str]) -> None:
    """Drop the decisions of recipes that name a candidate by its id here: the next run asks the server."""
    for decision in runs_dir.glob("*/select-*/selection.json"):
        if read_json(decision)["model_id"] in models:
            shutil.rmtree(decision.parent)


def _send_candidate(local: "MlflowClient", tracker: Any, model: Any, say: Say) -> None:
    """Register a kept candidate on the server, and decide there whether it becomes champion."""
    from mlflow.artifacts import download_artifacts

    from evaluation.selection import select

    name = next(
        version.name
        for version in local.search_model_versions()
        if version.tags.get("model_id") == model.model_id
    )
    # Another recipe's target would get a registered model of its own (`Tracker.model_name`).
    target = local.get_registered_model(name).tags.get("target", tracker.target_name)
    tracker = dataclasses.replace(tracker, target_name=target)
    metrics = {metric.key: metric.value for metric in model.metrics or []}
    dataset = next(iter(model.metrics))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(download_artifacts(artifact_uri=model.artifact_location, dst_path=scratch))
        candidate = tracker.register_candidate(
            folder,
            metrics,
            model.params,
            dataset.dataset_name,
            dataset.dataset_digest,
            name,
            sorted((folder / "evaluation").glob("*")),
            key=model.tags.get("key") or model.model_id,
            measured_at=dataset.timestamp,
        )
    decision = select(tracker.client, name, candidate.model_id)
    standing = "is now champion" if decision.promoted else "is not champion"
    say(f"{name} version {decision.version} {standing}: {decision.reason}")
