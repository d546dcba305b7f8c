"""Medusa's and EAGLE-3's heads for the servers that load their public checkpoints."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data.files import write_json
from distill.export.directory import check_out_dir, write_export
from distill.export.hf import TOKENIZER_FILES, servable, write_texts
from distill.export.pair import read_side, vocabulary, vocabulary_hash
from distill.export.serve_heads import HeadFormat, head_files
from distill.head_layouts import to_public, to_speculators, to_tgi
from distill.models import load_drafter


def export_heads(
    drafter_dir: Path,
    target_dir: Path,
    out_dir: Path,
    kind: HeadFormat,
    *,
    facts: Mapping[str, Any],
    force: bool = False,
) -> Path:
    """Write the drafter in `drafter_dir` as a public checkpoint (`distill.head_layouts`), with the target's
    tokenizer and the servers' command lines beside it; arguments as `export_hf` has them. Medusa's heads come
    twice: as vLLM loads them, and in `tgi/` as text-generation-inference does.
    """
    out_dir = Path(out_dir).resolve()
    check_out_dir(out_dir, force, kind)
    target = servable(facts, target_dir)

    def fill(folder: Path) -> None:
        draft = load_drafter(drafter_dir, "cpu")
        if kind == "speculators":
            names = list(read_side(target_dir).config.get("architectures") or [])
            found = to_speculators(draft, target, names, int(facts["num_speculative_tokens"]))
        else:
            found = to_public(draft)
        _write(folder, "model.safetensors", *found)
        if kind == "medusa":
            (folder / "tgi").mkdir()
            _write(folder / "tgi", "medusa_lm_head.safetensors", *to_tgi(draft, target))
        for name in TOKENIZER_FILES:
            if (target_dir / name).is_file():
                shutil.copyfile(target_dir / name, folder / name)
        write_texts(folder / "serve", head_files(kind, facts, target))
        write_texts(folder, {"README.md": card(kind, facts)})

    notes = {"vocabulary": vocabulary_hash(vocabulary(target_dir))}
    write_export(out_dir, kind, facts=facts, notes=notes, fill=fill, force=force)
    return out_dir


def _write(folder: Path, name: str, config: dict[str, Any], tensors: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    save_file(tensors, folder / name, metadata={"format": "pt"})
    write_json(folder / "config.json", config)


def card(kind: HeadFormat, facts: Mapping[str, Any]) -> str:
    """What stands beside the weights: what they are, and where the lines are that serve them."""
    name = {"medusa": "Medusa heads", "eagle": "EAGLE-3 layer", "speculators": "EAGLE-3 layer"}[kind]
    return "\n".join(
        [
            f"# {name} for {facts['target_model']}",
            "",
            f"Trained with the recipe {facts['recipe']} of draft-distill; measures stand in manifest.json.",
            "It drafts for this target alone and holds no embeddings: those are the target's.",
            "",
            "`serve/` holds a script for each server that takes it, such as `sh serve/vllm.sh`, and",
            "`serve/servers.json` lists them, and says of a server that is missing why. The scripts were",
            "written from the servers' documentation and were not run.",
            "",
        ]
    )
