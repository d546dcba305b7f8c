"""An MLflow store that cannot be used: the command line names it in one line, with exit code 2."""

import http.server
import os
import threading
from pathlib import Path

import pytest

from distill import cli


@pytest.mark.parametrize(
    "uri",
    ["http://127.0.0.1:9", "http://a b/", "nonsense://x", "mysql://me:pw@host/x", "databricks",
     "file:///nonexistent", "/tmp", " ", "sqlite://", "sqlite:///:memory:"],
)  # fmt: skip
@pytest.mark.parametrize(
    "words", [["compare"], ["promote", "models:/a/1"], ["export", "models:/a/1", "--out", "x"]]
)
def test_a_store_that_cannot_be_used_is_the_users_to_mend(
    uri: str, words: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert cli.main(words) == 2
    err = capfd.readouterr().err
    assert "MLFLOW_TRACKING_URI" in err and err.count("\n") == 1 and "pw" not in err


def test_an_empty_address_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")
    assert cli.main(["compare"]) == 0


@pytest.mark.parametrize(
    "words",
    [["compare"], ["promote", "models:/a/1"], ["export", "models:/a/1", "--out", "x"], ["select", "smoke"]],
)
def test_a_server_that_is_not_mlflows_is_named(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)  # 501 to all
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(http.server.BaseHTTPRequestHandler, "log_request", lambda *arguments: None)
    monkeypatch.setattr(http.server.BaseHTTPRequestHandler, "log_error", lambda *arguments: None)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.server_port}")
    try:
        assert cli.main(words) == 2
    finally:
        server.shutdown()
        server.server_close()
    (said,) = [line for line in capfd.readouterr().err.splitlines() if "API request" in line]
    assert "MLFLOW_TRACKING_URI" in said and "501" in said


@pytest.mark.parametrize("words", [["compare"], ["promote", "models:/a/1"]])
def test_a_damaged_database_is_named(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    database = Path(os.environ["DISTILL_RUNS"]) / "mlflow.db"
    database.write_text("rubbish" * 1000)
    assert cli.main(words) == 2
    err = capfd.readouterr().err
    assert f"{database} (MLFLOW_TRACKING_URI): file is not a database" in err and "Traceback" not in err
    assert database.read_text() == "rubbish" * 1000
    database.unlink()
    database.mkdir()
    assert cli.main(words) == 2 and "is no file" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["a%20b", "a?b=1"])
def test_a_folder_that_mlflow_would_misread_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DISTILL_RUNS", str(tmp_path / name))
    for words in (["sample", "smoke"], ["compare"]):
        assert cli.main(words) == 2
        assert "set DISTILL_RUNS" in capfd.readouterr().err
    assert not (tmp_path / "a").exists()
