"""The drafter as `distill.compact` has it: to ship beside recipes, and to start other drafters from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distill.compact import check_embeddings, write_compact
from distill.export.card import model_card
from distill.export.directory import check_out_dir, write_export
from distill.export.hf import write_texts
from distill.models import load_drafter
from distill.redact import redacted

UNEXPANDED = {"rows": 0, "filled": 0}


def export_compact(
    drafter_dir: Path, target_dir: Path, out_dir: Path, *, facts: Mapping[str, Any], force: bool = False
) -> Path:
    """Write the drafter in `drafter_dir` without the target's embeddings; arguments as `export_hf` has them.

    Raises `UserError` as `check_out_dir`, `check_embeddings` and `write_compact` do.
    """
    out_dir = Path(out_dir).resolve()
    check_out_dir(out_dir, force)

    def fill(folder: Path) -> None:
        drafter = load_drafter(drafter_dir, "cpu")
        check_embeddings(drafter, target_dir)
        write_compact(drafter, folder)
        card = model_card(redacted(dict(facts)), UNEXPANDED, out_dir.name, "compact")
        write_texts(folder, {"README.md": card})

    write_export(out_dir, "compact", facts=facts, notes={}, fill=fill, force=force)
    return out_dir
