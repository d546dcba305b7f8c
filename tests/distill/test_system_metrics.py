"""The machine's load stands beside a stage's measures."""

import threading
import time
from pathlib import Path

import pytest

from distill.system_metrics import system_metrics
from evaluation.store import open_client


@pytest.mark.parametrize("stage", ["train", "evaluate"])
def test_long_stages_are_watched_and_timed_ones_are_not(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.05")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    client = open_client(uri)
    run = client.create_run(client.create_experiment("e", (tmp_path / "artifacts").as_uri()))
    with system_metrics(stage, run.info.run_id, uri):
        time.sleep(0.5)
    logged = {name for name in client.get_run(run.info.run_id).data.metrics if name.startswith("system/")}
    expected = {"system/cpu_utilization_percentage", "system/system_memory_usage_megabytes"}
    assert expected <= logged if stage == "train" else not logged


def test_a_server_that_is_gone_costs_the_stage_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.05")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with system_metrics("train", "0" * 32, "http://127.0.0.1:9"):
        assert _watching()  # the control: there was a monitor to end
        time.sleep(0.2)
    assert not _watching()


def _watching() -> bool:
    return any(thread.name == "SystemMetricsMonitor" for thread in threading.enumerate())
