"""The command lines beside Medusa's and EAGLE-3's checkpoints, and TGI's copy of the former."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from distill.export.directory import misread_name
from distill.export.heads import export_heads
from distill.export.serve_heads import HeadFormat, head_files
from distill.models import Target, save_drafter
from evaluation.decoder.drafters import DraftModel
from evaluation.decoder.medusa import start_medusa

FACTS: dict[str, Any] = {"target_model": "org/target", "num_speculative_tokens": 3, "recipe": "r"}


@pytest.mark.parametrize(
    ("kind", "served"),
    [
        ("medusa", {"vllm", "tgi"}),
        ("eagle", {"vllm", "sglang", "tensorrt-llm"}),
        ("speculators", {"vllm"}),
    ],
)
def test_every_server_stands_with_its_files_or_a_reason(
    kind: HeadFormat, served: set[str], tmp_path: Path
) -> None:
    files = head_files(kind, FACTS, "a 'quoted' target")
    servers = json.loads(files["servers.json"])
    assert {name for name, found in servers.items() if isinstance(found, list)} == served
    assert set(servers) - served >= {"transformers", "openvino", "onnx"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        if name.endswith(".sh"):
            subprocess.run(["sh", "-n", str(tmp_path / name)], check=True)


def test_vllm_is_told_the_kind_and_the_number_of_drafts() -> None:
    config = json.loads(head_files("eagle", FACTS, "t")["vllm.json"])
    assert config["method"] == "eagle3" and config["num_speculative_tokens"] == 3
    assert json.loads(head_files("medusa", FACTS, "t")["vllm.json"])["method"] == "medusa"
    sglang = head_files("eagle", FACTS, "t")["sglang.sh"]
    assert "EAGLE3" in sglang and "--speculative-num-draft-tokens 4" in sglang


def test_a_path_may_name_the_kind_that_it_holds() -> None:
    assert misread_name(Path("/m/eagle3"), "speculators") is None
    assert misread_name(Path("/m/eagle3"), "medusa") == "eagle3"
    assert misread_name(Path("/m/eagle3"), "hf") == "eagle3"


def test_medusas_heads_come_for_vllm_and_for_tgi(target: Target, tmp_path: Path) -> None:
    vocab = torch.arange(0, 96, 3)
    save_drafter(DraftModel(start_medusa(target.model, vocab, 2, shared_head=False), vocab), tmp_path / "own")
    target.model.save_pretrained(tmp_path / "target")
    target.tokenizer.save_pretrained(tmp_path / "target")
    (tmp_path / "target" / "tokenizer.model").write_text("pieces")
    out = export_heads(tmp_path / "own", tmp_path / "target", tmp_path / "medusa", "medusa", facts=FACTS)
    assert "architectures" not in json.loads((out / "tgi" / "config.json").read_text())
    assert {file.name for file in (out / "tgi").iterdir()} == {"config.json", "medusa_lm_head.safetensors"}
    assert (out / "serve" / "tgi.sh").is_file()
    assert (out / "tokenizer.model").is_file() and (out / "tokenizer.json").is_file()
    manifest = json.loads((out / "manifest.json").read_text())
    assert "tgi/medusa_lm_head.safetensors" in manifest["files"] and len(manifest["vocabulary"]) == 16
