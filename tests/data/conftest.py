"""Fixtures of the tests of prompts."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from data.prompts import (
    Prompt,
)
from tests.data.prompt_helpers import OPEN, STRUCTURED, WIDE, load


@pytest.fixture(scope="module")
def builtin() -> list[Prompt]:
    return load(STRUCTURED, OPEN, WIDE)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    def to_file(*rows: object, name: str = "prompts.jsonl") -> str:
        text = "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows)
        (tmp_path / name).write_text(text, encoding="utf-8")
        return str(tmp_path / name)

    return to_file
