"""Every test runs offline, leaves nothing behind, and skips what needs a GPU where there is none."""

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    if not wanting:
        return
    import torch

    if not torch.cuda.is_available():
        for item in wanting:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No hub, no tracking server, and runs in a folder of the test's own."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("DISTILL_RUNS", str(tmp_path_factory.mktemp("runs")))


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two random Llamas on disk with one tokenizer: a target and a smaller member of its family."""
    from distill.tiny import make_tiny_pair

    return make_tiny_pair(tmp_path_factory.mktemp("tiny"), seed=3)
