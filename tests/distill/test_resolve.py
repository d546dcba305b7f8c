"""A model is hashed again only where it changed, and half a download is none."""

import json
import os
import time
from pathlib import Path

import pytest

from data.errors import UserError
from data.files import sha256_file
from distill import resolve
from distill.hub import Hub
from distill.resolve import find_model, model_digest, resolve_model


def test_a_large_file_is_read_once_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, cache, read = tmp_path / "model", tmp_path / "cache", []
    folder.mkdir()
    file = folder / "model.safetensors"

    def write(content: str, seconds: float) -> None:
        file.write_text(content)
        os.utime(file, (seconds, seconds))

    def counted(path: Path) -> str:
        read.append(path)
        return sha256_file(path)

    monkeypatch.setattr(resolve, "_KEPT_BYTES", 1)
    monkeypatch.setattr(resolve, "sha256_file", counted)
    write("one", 1e9)
    assert model_digest(folder, cache) == model_digest(folder, cache) and len(read) == 2  # too fresh to trust
    monkeypatch.setattr(resolve, "_SETTLED_NS", -1)
    first = model_digest(folder, cache)
    assert model_digest(folder, cache) == model_digest(folder, cache) == first and len(read) == 3
    time.sleep(0.02)  # a tick of the file system's clock
    write("two", 1e9)  # the same size and time of change
    assert model_digest(folder, cache) != first and len(read) == 4
    for damaged in ("[1]", "no json", json.dumps({str(file): [1]})):
        (cache / "digests.json").write_text(damaged)
        assert model_digest(folder, cache) == model_digest(folder)


def test_half_a_download_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    snapshot = tmp_path / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(snapshot))
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (snapshot / "config.json").write_text("{}")

    def refused(missing: str) -> None:
        assert find_model("owner/name", None, tmp_path) is None
        assert "downloaded before" not in Hub().look("target", "owner/name", None, "model").text
        with pytest.raises(UserError, match=f"only a part was downloaded \\({missing}"):
            resolve_model("owner/name", None, tmp_path)

    monkeypatch.setattr(Hub, "_ask", lambda *_: 0)
    refused("model.safetensors")
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    (snapshot / "model-1.safetensors").touch()
    refused("model-2.safetensors")
    (snapshot / "model-2.safetensors").touch()
    assert resolve_model("owner/name", None, tmp_path) == find_model("owner/name", None, tmp_path) == snapshot
    assert "downloaded before" in Hub().look("target", "owner/name", None, "model").text
