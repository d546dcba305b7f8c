"""Text that may leave this machine (MLflow, logs, model cards): without secrets, short, safe as a name."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MAX_VALUE = 500
"""Longest parameter value kept: enough to recognise it; the whole recipe is an artifact."""
_SECRET_NAMES = re.compile(r"(?:KEY|TOKEN|SECRET|PASSWORD)$")
_SHORTEST_SECRET = 8  # shorter ones, such as "none", stand in text by chance
_SECRETS = (
    (re.compile(r"\bhf_[A-Za-z0-9]{8,}"), "hf_***"),
    (re.compile(r"\bsk-[A-Za-z0-9_-]{16,}"), "sk-***"),
    (re.compile(r"(?<=Bearer )[A-Za-z0-9._~+/=-]{8,}"), "***"),
    (re.compile(r"(?i)(?<=authorization: basic )[A-Za-z0-9+/=]{8,}"), "***"),
    (re.compile(r"(?<=://)[^/\s\"']+(?=@)"), "***"),  # a password may hold another @
    (re.compile(r"(?i)(?<=[?&])((?:api_?key|token|access_token|secret|password)=)[^&\s\"']+"), r"\1***"),
)


def redact(text: str) -> str:
    """`text` without tokens of Hugging Face and OpenAI, bearer tokens, and passwords and keys in URIs; nor
    what stands in a variable of the environment that is named like a secret, whatever its form.
    """
    for name, value in os.environ.items():
        if _SECRET_NAMES.search(name) and len(value) >= _SHORTEST_SECRET:
            text = text.replace(value, "***")
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text


def safe_name(text: str) -> str:
    """`text` as an experiment's or registered model's name: letters, digits, `._-`; `org/x` is `org--x`."""
    text = redact(text).removeprefix("package:")
    if text.startswith(("/", "~", ".")):
        text = Path(text).name
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", text.replace("/", "--")).strip("-.")
    return name[:200] or "unnamed"


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested mappings as `a.b.c` -> text, redacted and cut to MAX_VALUE characters."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        name = re.sub(r"[^A-Za-z0-9_./ -]", "_", f"{prefix}{key}")
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{name}.")
        else:
            text = redact(str(value))
            flat[name] = text if len(text) <= MAX_VALUE else text[: MAX_VALUE - 3] + "..."
    return flat


def redacted(value: Any) -> Any:
    """A JSON-like value with every text in it redacted."""
    if isinstance(value, Mapping):
        return {str(key): redacted(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redacted(item) for item in value]
    return redact(value) if isinstance(value, str) else value
