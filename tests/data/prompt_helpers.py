"""What the tests of prompts share."""

from typing import Any

from pydantic import TypeAdapter

from data.prompts import (
    Prompt,
    PromptSource,
    Splits,
    load_prompts,
)

SPLITS = Splits()
STRUCTURED, OPEN, WIDE = "builtin:structured", "builtin:open", "builtin:wide"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def load(*entries: str | dict[str, Any], seed: int = 0, splits: Splits | None = None) -> list[Prompt]:
    sources = TypeAdapter(list[PromptSource]).validate_python(list(entries))
    return load_prompts(sources, splits=splits or SPLITS, seed=seed)
