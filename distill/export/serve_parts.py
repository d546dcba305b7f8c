"""What the scripts for all servers have in common."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_HEAD = """#!/bin/sh
# {what}
set -eu
HERE=$(cd "$(dirname "$0")" && pwd)
DRAFT=$(dirname "$HERE")
TARGET=${{TARGET:-{target}}}
"""


def script(what: str, target: str, body: str) -> str:
    """A shell script that knows its own place (HERE), the drafter's (DRAFT) and the target (TARGET)."""
    return _HEAD.format(what=what, target=shlex.quote(target)) + body


def copied(*names: str) -> dict[str, str]:
    """The text of Python files of this package that an export carries."""
    return {name: Path(__file__).with_name(name).read_text("utf-8") for name in names}


def samples_draft(serving: Mapping[str, Any]) -> bool:
    """Does the recipe serve with drafts that are sampled?"""
    return float(serving.get("temperature", 0.0)) > 0 and serving.get("draft_sampling") == "sampled"


def listed(files: Mapping[str, Mapping[str, str]], reasons: Mapping[str, str]) -> dict[str, str]:
    """The files of every server without a reason against it, and servers.json, where all of them stand."""
    kept = {server: texts for server, texts in files.items() if server not in reasons}
    servers: dict[str, Any] = {server: sorted(texts) for server, texts in kept.items()}
    servers |= {server: f"not served: {reason}" for server, reason in sorted(reasons.items())}
    return {name: text for texts in kept.values() for name, text in texts.items()} | {
        "servers.json": as_json(servers)
    }


def as_json(value: Any) -> str:
    """The text of a JSON file."""
    return json.dumps(value, indent=2) + "\n"
