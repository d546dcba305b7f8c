"""Prompts that were read and chosen before: comparing the rows of large data sets takes minutes, and every
command asks for them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data.files import canonical_hash, sha256_file, user_path, write_json
from data.prompts import Prompt, PromptSource, Splits, load_prompts, parse_source


def cached_prompts(
    sources: Sequence[PromptSource], *, splits: Splits, seed: int, folder: Path
) -> list[Prompt]:
    """`load_prompts`, remembered in `folder` where data sets of the hub are among the sources.

    Those are pinned by their commits; another content of a file, another setting and another version of this
    package are another entry. An entry that cannot be read is made again.
    """
    if not any(parse_source(each.source).kind == "hub" for each in sources):
        return load_prompts(sources, splits=splits, seed=seed)
    chosen = [[each.source, each.count, _content(each)] for each in sources]
    path = folder / f"prompts-{canonical_hash([_code(), chosen, splits.model_dump(), seed])}.json"
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        return [_prompt(row) for row in json.loads(path.read_bytes())]
    prompts = load_prompts(sources, splits=splits, seed=seed)
    write_json(path, [asdict(prompt) for prompt in prompts])
    return prompts


def _prompt(row: dict[str, Any]) -> Prompt:
    return Prompt(**{**row, "messages": tuple((role, content) for role, content in row["messages"])})


def _content(source: PromptSource) -> str:
    """A digest of the file that a source names; empty where it names none, or none that can be read."""
    parsed = parse_source(source.source)
    if parsed.kind not in ("file", "log", "specbench"):
        return ""
    with contextlib.suppress(OSError):  # reading the source says what is wrong with it
        return sha256_file(user_path(parsed.place))
    return ""


def _code() -> str:
    """A digest of the code that reads, splits and compares prompts."""
    root = Path(__file__).parent
    return canonical_hash([sha256_file(path) for path in sorted(root.rglob("*.py"))])
