"""The MLflow store that a runs directory belongs to, and a client for it."""

from __future__ import annotations

import logging
import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from data.errors import UserError
from data.files import commit_file

if TYPE_CHECKING:
    from mlflow import MlflowClient

_DATABASE = re.compile(
    "file is not a database|database disk image is malformed|unable to open database file"
    "|readonly database|database is locked"
)
_STORES = re.compile(r"https?://|sqlite:///(?!:memory:)|(postgresql|mysql|mssql)(\+\w+)?://")
_REFUSED = re.compile(
    "API request to .*? (failed with error code [0-9]+|failed with exception|was successful but)"
)


def named_store() -> str:
    """MLFLOW_TRACKING_URI, empty where it is not set.

    `UserError` where a run could not be kept there: in memory, in MLflow's former folders, in Databricks
    (whose experiments are paths in a workspace).
    """
    uri = os.environ.get("MLFLOW_TRACKING_URI", "")
    if uri and not _STORES.match(uri):
        raise UserError(
            f"MLFLOW_TRACKING_URI is {uri}: name an MLflow server (http:// or https://) or a database "
            "(sqlite:///FILE, postgresql://...), or unset it"
        )
    return uri


def tracking_uri(runs_dir: Path) -> str:
    """The store that the environment names, else the SQLite file under `runs_dir`.

    `UserError` where it names what is no store, or the folder's path would read as another one in an address.
    """
    if uri := named_store():
        return uri
    path = Path(runs_dir).resolve() / "mlflow.db"
    if odd := re.search(r"%[0-9A-Fa-f]{2}|\?", str(path)):
        raise UserError(f"MLflow cannot keep a database at {path}, for the {odd[0]}: set DISTILL_RUNS")
    return f"sqlite:///{path}"


def open_client(tracking_uri: str) -> MlflowClient:
    """A client bound to `tracking_uri`, registry included, that leaves MLflow's global state alone.

    MLflow's usage reports to its makers are turned off unless the environment says otherwise, and so are its
    progress bars, its links to a server's pages and the log of a new database's migrations. `UserError` where
    MLflow knows no such store.
    """
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    os.environ.setdefault(
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3"
    )  # the default waits minutes for a dead server
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")  # seconds; 120 by default
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # stdout is for --json
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    for name in ("alembic", "mlflow.store.model_registry"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # It logs every fault with its traceback and SQL, and raises it too: once is enough.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    refused = f"MLflow cannot use its store {tracking_uri} (MLFLOW_TRACKING_URI)"
    if tracking_uri.startswith("sqlite:///"):
        path = Path(tracking_uri.removeprefix("sqlite:///"))
        if path.exists() and not (path.is_file() and os.access(path, os.R_OK)):
            raise UserError(f"{refused}: {path} is no file that can be read")  # MLflow would try for minutes
        _make_store(path)
    try:
        return MlflowClient(tracking_uri=tracking_uri, registry_uri=tracking_uri)
    except Exception as error:
        said = database_fault(error)
        if not said and not isinstance(error, (MlflowException, OSError, ImportError)):
            raise
        raise UserError(f"{refused}: {said or error}") from error


def database_fault(error: BaseException) -> str:
    """What a damaged, locked or unreadable database said, however deep in `error`; empty where none did."""
    cause: BaseException | None = error
    while cause is not None:
        if found := _DATABASE.search(str(cause)):
            return found[0]
        cause = cause.__cause__ or cause.__context__
    return ""


def server_fault(error: Exception) -> str:
    """How an MLflow server refused a request, or what is no such server answered; empty where none did."""
    found = _REFUSED.search(str(error))
    return found[0] if found else ""


def _make_store(path: Path) -> None:
    """Make a new database whole or not at all: MLflow's migrations cannot be resumed where a process
    was killed between them.
    """
    if path.exists() or not path.parent.is_dir():
        return
    from mlflow.store.tracking import DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp") as scratch:
        made = Path(scratch) / path.name
        store = SqlAlchemyStore(f"sqlite:///{made}", DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH)
        store._dispose_engine()  # what its journal holds comes into the file
        commit_file(made, path)
    _forget(f"sqlite:///{path}")


def _forget(uri: str) -> None:
    """Close the connections that MLflow keeps by address: those of a database that stood here before lead to
    the deleted file, and SQLite refuses to write there.
    """
    from mlflow.store.model_registry.sqlalchemy_store import SqlAlchemyStore as Registry
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    for store in (SqlAlchemyStore, Registry):
        if engine := store._engine_map.get(uri):
            engine.dispose()


def find_or_make_experiment(client: MlflowClient, name: str, artifacts: str | None) -> str:
    """The id of an experiment; `UserError` where it was deleted."""
    found = client.get_experiment_by_name(name)
    if found is None:
        return str(client.create_experiment(name, artifact_location=artifacts))
    if found.lifecycle_stage == "deleted":
        raise UserError(
            f"The MLflow experiment {name} was deleted: restore it (`mlflow experiments restore -x "
            f"{found.experiment_id}`) or use another runs directory."
        )
    return str(found.experiment_id)
