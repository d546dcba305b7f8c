"""Medusa's and EAGLE-3's heads for the servers that load their public checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from data.files import write_json
from distill.export.directory import check_out_dir, write_export
from distill.export.hf import write_texts
from distill.head_layouts import to_public
from distill.models import load_drafter

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
METHODS = {"medusa": "medusa", "eagle": "eagle3"}
"""vLLM's names for them."""


def export_heads(
    drafter_dir: Path,
    target_dir: Path,
    out_dir: Path,
    kind: Literal["medusa", "eagle"],
    *,
    facts: Mapping[str, Any],
    force: bool = False,
) -> Path:
    """Write the drafter in `drafter_dir` as a public checkpoint of its kind (`distill.head_layouts`), with
    the target's tokenizer beside it; arguments as `export_hf` has them.
    """
    from safetensors.torch import save_file

    out_dir = Path(out_dir).resolve()
    check_out_dir(out_dir, force, kind)

    def fill(folder: Path) -> None:
        config, tensors = to_public(load_drafter(drafter_dir, "cpu"))
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        write_json(folder / "config.json", config)
        for name in TOKENIZER_FILES:
            if (target_dir / name).is_file():
                shutil.copyfile(target_dir / name, folder / name)
        write_texts(folder, {"README.md": card(kind, facts, out_dir)})

    write_export(out_dir, kind, facts=facts, notes={}, fill=fill, force=force)
    return out_dir


def card(kind: str, facts: Mapping[str, Any], out_dir: Path) -> str:
    """What stands beside the weights: what they are, and the line that serves them."""
    speculative = {
        "method": METHODS[kind],
        "model": str(out_dir),
        "num_speculative_tokens": facts["num_speculative_tokens"],
    }
    return "\n".join(
        [
            f"# {METHODS[kind]} heads for {facts['target_model']}",
            "",
            f"Trained with the recipe {facts['recipe']} of draft-distill; measures stand in manifest.json.",
            "They draft for this target alone and hold no embeddings: those are the target's.",
            "",
            "```sh",
            f"vllm serve {facts['target_model']} --speculative-config '{json.dumps(speculative)}'",
            "```",
            "",
            "The line was written from vLLM's documentation; it was not run here.",
            "",
        ]
    )
