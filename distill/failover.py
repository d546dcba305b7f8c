"""An MLflow client that loses nothing when its server dies: it goes on with a local store, and `distill sync`
sends that store's runs later.

The local store stands in RUNS/unsent. A run that began on the server goes on there as a run of its own, whose
tag `continues` names the one on the server.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evaluation.store import database_fault, open_client

if TYPE_CHECKING:
    from mlflow import MlflowClient

CONTINUES = "continues"
FOLDER = "unsent"
_SERVER_FAULTS = {"INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE"}


def unsent_store(runs_dir: Path) -> str:
    """The tracking URI of the local store for what could not be sent."""
    return f"sqlite:///{Path(runs_dir).resolve() / FOLDER / 'mlflow.db'}"


def unreachable(error: Exception) -> bool:
    """Does the error say that the server or its database is gone, rather than that it refused?"""
    from mlflow.exceptions import MlflowException

    if isinstance(error, MlflowException):
        lost = "API request to" in str(error) and error.error_code in _SERVER_FAULTS
        return lost or bool(database_fault(error))  # MLflow answers some of those as bad requests
    return isinstance(error, ConnectionError) or type(error).__module__.startswith(("requests.", "urllib3."))


class FailoverClient:
    """Every call goes to the server until one finds it gone; from then on to the local store."""

    def __init__(self, server: MlflowClient, runs_dir: Path, experiment: str) -> None:
        """`experiment`: the name of the one experiment whose runs are made through this client."""
        self.server, self.runs_dir, self.experiment = server, Path(runs_dir), experiment
        self.local: MlflowClient | None = None
        self.names: dict[str, str] = {}
        """Name of every run that was made on the server, by its id."""
        self.ids: dict[str, str] = {}
        """Local id of a run or experiment, by its id on the server."""

    @property
    def offline(self) -> bool:
        return self.local is not None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.local is None:
                try:
                    result = getattr(self.server, name)(*args, **kwargs)
                except Exception as error:
                    if not unreachable(error):
                        raise
                    self._go_offline(error)
                else:
                    if name == "create_run":
                        self.names[result.info.run_id] = kwargs.get("run_name", "")
                        self.ids.setdefault(result.info.experiment_id, "")
                    return result
            return getattr(self.local, name)(*self._translated(args), **self._translated(kwargs))

        return call

    def _go_offline(self, error: Exception) -> None:
        from distill.redact import redact

        folder = self.runs_dir / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        self.local = open_client(unsent_store(self.runs_dir))
        found = self.local.get_experiment_by_name(self.experiment)
        artifacts = (folder.resolve() / "artifacts").as_uri()
        made = found.experiment_id if found else self.local.create_experiment(self.experiment, artifacts)
        self.ids = dict.fromkeys(self.ids, str(made))
        sys.stderr.write(
            f"MLflow's server is gone ({redact(str(error))[:200]}); what follows is kept in {folder} "
            "until `distill sync` sends it\n"
        )

    def _translated(self, value: Any) -> Any:
        """`value` with the ids of the server's runs and experiment replaced by those of the local store."""
        if isinstance(value, dict):
            return {key: self._translated(item) for key, item in value.items()}
        if isinstance(value, tuple):
            return tuple(self._translated(item) for item in value)
        if isinstance(value, str) and value in self.names and value not in self.ids:
            assert self.local is not None
            tags = {CONTINUES: value}
            experiment = next(iter(self.ids.values()))
            run = self.local.create_run(experiment, run_name=self.names[value], tags=tags)
            self.ids[value] = run.info.run_id
        return self.ids.get(value, value) if isinstance(value, str) else value
