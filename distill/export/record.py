"""What MLflow knows of a candidate: its recipe and its measures, from the runs that registered it."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.errors import UserError
from evaluation.store import open_client, tracking_uri

if TYPE_CHECKING:
    from mlflow import MlflowClient


@dataclass(frozen=True)
class CandidateRecord:
    """A registered drafter's past."""

    recipe_name: str
    recipe: dict[str, Any]
    """As `Recipe.resolved` gave it."""
    evaluation: dict[str, Any]
    """evaluation.json."""
    run_id: str
    """The MLflow run that registered it."""


def candidate_record(model_id: str, runs_dir: Path) -> CandidateRecord:
    """Read the record of LoggedModel `model_id`; `UserError` where its runs no longer hold it."""
    uri = tracking_uri(runs_dir)
    client = open_client(uri)
    model = client.get_logged_model(model_id)
    run_id = model.source_run_id
    run = client.get_run(run_id)
    parent = run.data.tags.get("mlflow.parentRunId", run_id)
    siblings = client.search_runs(
        [run.info.experiment_id],
        f"tags.`mlflow.parentRunId` = '{parent}' and tags.stage = 'evaluate'",
    )
    evaluation = _stored(model, uri) or _first(
        client, [run_id, *(each.info.run_id for each in siblings)], "evaluation.json"
    )
    recipe = _first(client, [parent], "recipe.json")
    if evaluation is None or recipe is None:
        raise UserError(
            f"MLflow holds no {'evaluation' if recipe else 'recipe'} of candidate {model_id}: register it "
            "again with `distill select RECIPE --fresh`."
        )
    return CandidateRecord(run.data.tags["recipe"], recipe, evaluation, run_id)


def _stored(model: Any, uri: str) -> dict[str, Any] | None:
    """The evaluation that stands beside a candidate's weights; those of earlier versions had none there."""
    from mlflow.artifacts import download_artifacts
    from mlflow.exceptions import MlflowException

    source = f"{model.artifact_location}/evaluation/evaluation.json"
    with tempfile.TemporaryDirectory() as scratch:
        try:
            found = download_artifacts(artifact_uri=source, dst_path=scratch, tracking_uri=uri)
        except (MlflowException, OSError):
            return None
        return dict(json.loads(Path(found).read_text("utf-8")))


def _first(client: MlflowClient, run_ids: list[str], name: str) -> dict[str, Any] | None:
    for run_id in run_ids:
        if name in {file.path for file in client.list_artifacts(run_id)}:
            with tempfile.TemporaryDirectory() as scratch:
                text = Path(client.download_artifacts(run_id, name, scratch)).read_text("utf-8")
            return dict(json.loads(text))
    return None
