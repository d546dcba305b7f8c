"""The drafters that stand in MLflow's registry: what a reference names, and its files on this machine."""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.errors import UserError
from data.files import canonical_hash, sha256_file
from distill.redact import redact, safe_name
from evaluation.store import open_client, server_fault, tracking_uri

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

_DRAFTER_SUFFIXES = {".json", ".safetensors", ".jinja", ".txt", ".model"}


def drafter_files(drafter_dir: Path) -> list[Path]:
    """The files of a saved drafter. `UserError` when weights or config are missing, or a file may hold a
    pickle.
    """
    directory = Path(drafter_dir)
    files = sorted(path for path in directory.iterdir() if path.is_file()) if directory.is_dir() else []
    names = {path.name for path in files}
    for needed in ("config.json", "model.safetensors"):
        if needed not in names:
            raise UserError(f"{directory} is no drafter: it holds no {needed}.")
    odd = sorted(path.name for path in files if path.suffix not in _DRAFTER_SUFFIXES)
    if odd:
        raise UserError(
            f"{directory} holds {', '.join(odd)}: only safetensors, JSON and tokenizer files are stored."
        )
    return files


def drafter_digest(drafter_dir: Path) -> str:
    """What makes two drafters the same: a hash of config, weights and draft vocabulary."""
    named = {path.name: path for path in drafter_files(drafter_dir)}
    kept = [name for name in ("config.json", "model.safetensors", "draft_vocab.json") if name in named]
    return canonical_hash({name: sha256_file(named[name]) for name in kept})


def resolve_candidate(reference: str, runs_dir: Path) -> Path:
    """The drafter directory of `models:/NAME@ALIAS`, `models:/NAME/VERSION`, `models:/m-ID` or a bare `m-ID`.

    Downloaded once to `RUNS/candidates/MODEL_ID` (a LoggedModel never changes) and checked against the
    digest it was stored with. Raises `UserError` when there is no such candidate, it never became READY, or
    the files differ.
    """
    from mlflow.artifacts import download_artifacts
    from mlflow.exceptions import MlflowException

    uri = tracking_uri(runs_dir)
    model = finished_model(open_client(uri), reference)
    final = Path(runs_dir) / "candidates" / safe_name(model.model_id)
    if not final.exists():
        final.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=final.parent, prefix=f".{final.name}."))
        try:
            found = download_artifacts(
                artifact_uri=model.artifact_location, dst_path=str(scratch), tracking_uri=uri
            )
            Path(found).rename(final)
        except MlflowException as error:
            raise UserError(
                f"The files of candidate {reference} cannot be read: {redact(str(error))}"
            ) from error
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    if drafter_digest(final) != model.tags.get("drafter_digest"):
        raise UserError(f"The files of candidate {reference} in {final} were changed: delete that directory.")
    return final


def finished_model(client: MlflowClient, reference: str) -> Any:
    """The LoggedModel that a reference names (see `resolve_candidate`); `UserError` where there is none, or
    it never became READY.
    """
    from mlflow.exceptions import MlflowException

    try:
        model = client.get_logged_model(model_id_of(client, reference))
    except MlflowException as error:
        raise _no_candidate(reference, error) from error
    if str(model.status) != "READY":
        raise UserError(
            f"Candidate {reference} is {model.status}: its run did not finish, so it cannot be used."
        )
    return model


def _no_candidate(reference: str, error: MlflowException) -> UserError:
    if fault := server_fault(error):
        return UserError(f"MLFLOW_TRACKING_URI: no server there tells of candidate {reference} ({fault})")
    return UserError(
        f"There is no candidate {reference} in MLflow ({redact(error.message).rstrip('.')}): run the recipe "
        "that makes it first."
    )


def model_id_of(client: MlflowClient, reference: str) -> str:
    """The LoggedModel that a reference names (see `resolve_candidate`).

    Raises `UserError` where it names none that this tool registered.
    """
    from mlflow.exceptions import MlflowException

    try:
        return _named_model(client, reference)
    except MlflowException as error:
        raise _no_candidate(reference, error) from error


def _named_model(client: MlflowClient, reference: str) -> str:
    name = reference.removeprefix("models:/")
    if re.fullmatch(r"m-[0-9a-zA-Z-]+", name):
        return name
    if match := re.fullmatch(r"([^/@]+)@([^/@]+)", name):
        version = client.get_model_version_by_alias(*match.groups())
    elif match := re.fullmatch(r"([^/@]+)/(\d+)", name):
        version = client.get_model_version(*match.groups())
    else:
        raise UserError(
            f"{reference!r} names no candidate: write models:/NAME@champion, models:/NAME/3 or models:/m-ID."
        )
    if "model_id" not in version.tags:
        raise UserError(f"{reference} was not registered by this tool: it names no logged model.")
    return str(version.tags["model_id"])
