"""The directory of an export: whole or not at all, never over something else, with a manifest of what is in
it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from data.errors import UserError
from data.files import file_above, replace_directory, sha256_file, write_json
from distill.redact import redacted
from evaluation.measures import best_decode, headline_acceptance, headline_split, machine_label

FORMAT = "draft-distill/export/1"
MANIFEST = "manifest.json"
MISREAD_NAMES = ("eagle-", "eagle3", "dflash", "dspark", "medusa")
"""vLLM takes a drafter for another kind where its path holds one of these."""


def check_out_dir(out_dir: Path, force: bool, kind: str = "") -> None:
    """`UserError` when `out_dir` has a name that vLLM misreads for an export of format `kind`, holds
    something that is no export of ours, or an export while `force` is not given.
    """
    if (name := misread_name(out_dir, kind)) is not None:
        raise UserError(
            f"vLLM would take a drafter in {out_dir} for another kind, as the path contains {name!r}: "
            "choose another directory."
        )
    if out_dir.is_symlink() or (out_dir.exists() and not out_dir.is_dir()):
        raise UserError(f"{out_dir} is in the way: it is no directory.")
    if (file := file_above(out_dir)) is not None:
        raise UserError(f"{file} is in the way: it is no directory.")
    if not out_dir.is_dir() or not any(out_dir.iterdir()):
        return
    if not _is_export(out_dir):
        raise UserError(
            f"{out_dir} holds something that is no export of this tool: choose another, or remove it."
        )
    if not force:
        raise UserError(f"{out_dir} holds an export already: --force replaces it.")


def misread_name(out_dir: Path, kind: str = "") -> str | None:
    """What in the path makes vLLM take an export of format `kind` for another kind of drafter."""
    own = {"medusa": "medusa", "eagle": "eagle", "speculators": "eagle"}.get(kind)
    names = (name for name in MISREAD_NAMES if name in str(out_dir).lower())
    return next((name for name in names if not (own and name.startswith(own))), None)


def write_export(
    out_dir: Path,
    kind: str,
    *,
    facts: Mapping[str, Any],
    notes: Mapping[str, Any],
    fill: Callable[[Path], None],
    force: bool,
) -> None:
    """Let `fill` write the files of an export of format `kind`, add manifest.json, and put all of it at
    `out_dir` at once.

    The manifest holds the sha256 of every file, where the drafter comes from (`facts`, without secrets),
    what was measured, and `notes` of the format, read after `fill`. Raises `UserError` as `check_out_dir`
    does.
    """
    check_out_dir(out_dir, force, kind)

    def write(folder: Path) -> None:
        fill(folder)
        files = {
            str(file.relative_to(folder)): sha256_file(file)
            for file in sorted(folder.rglob("*"))
            if file.is_file()
        }
        known = redacted({key: value for key, value in facts.items() if key != "evaluation"})
        manifest = {
            "format": FORMAT,
            "kind": kind,
            "facts": known,
            "measured": measured(facts.get("evaluation") or {}),
            "files": files,
            **notes,
        }
        write_json(folder / MANIFEST, manifest)

    replace_directory(out_dir, write)


def measured(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """Acceptance and speedup of an evaluation.json in short: its headline, with sample sizes and machine."""
    if not evaluation:
        return {}
    serving, best = evaluation.get("serving") or {}, best_decode(evaluation)
    rows = evaluation.get("acceptance") or []
    split = headline_split(evaluation)
    acceptance = {
        name: headline_acceptance(rows, name, serving, split) for name in ("sampled", "argmax", "greedy")
    }
    kept = ("drafter", "split", "num_speculative_tokens", "prompts", "tokens_per_target_call", "speedup")
    return {
        "acceptance": {name: found for name, found in acceptance.items() if found},
        "decode": {key: best[key] for key in kept if key in best},
        "serving": serving,
        "machine": machine_label(evaluation.get("machine") or {}),
        "data_digest": evaluation.get("data_digest"),
    }


def _is_export(directory: Path) -> bool:
    try:
        manifest = json.loads((directory / MANIFEST).read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and str(manifest.get("format", "")).startswith("draft-distill/")
