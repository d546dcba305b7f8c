"""The recipe that every case begins with, and how one is changed."""

from __future__ import annotations

from pathlib import Path

from distill.recipe import RECIPES

SMOKE = (RECIPES / "smoke.yaml").read_text()


def mine(tmp_path: Path, text: str | bytes = SMOKE) -> str:
    path = tmp_path / "mine.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


def edited(old: str, new: str) -> str:
    assert old in SMOKE, old
    return SMOKE.replace(old, new, 1)


FEW = edited("builtin:structured, count: 160", "builtin:sql, count: 60").replace(
    "batch_size: 16", "batch_size: 4"
)
