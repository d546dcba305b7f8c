"""Prompt files that are refused."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.bad_input.recipes import mine


def rows(*values: Any) -> bytes:
    return "".join(f"{value if isinstance(value, str) else json.dumps(value)}\n" for value in values).encode()


def prompts(count: int = 40) -> list[dict[str, str]]:
    words = "river stone cloud engine paper window garden letter winter silver market bridge".split()
    return [
        {"prompt": f"Say why {words[i % 12]} {i * i + 7} is a {words[(i * 5 + i // 12) % 12]}{i}."}
        for i in range(count)
    ]


USER = {"role": "user", "content": "Hello there"}
PROMPTS: dict[str, tuple[str, bytes, list[str]]] = {
    "an empty file": ("file", b"", ["is empty"]),
    "blank lines": ("file", b"\n \n\n", ["gives no prompts"]),
    "a line that is no JSON": ("file", rows({"prompt": "x"}, "{broken"), [":2: not JSON", "one JSON object"]),
    "a line cut off": ("file", rows({"prompt": "x"}) + b'{"prompt": "Tell me ab', [":2: not JSON"]),
    "a list of prompts": ("file", rows([{"prompt": "x"}]), [":1:", "JSON object, not list"]),
    "a spreadsheet": ("file", b"prompt,task\nhello,chat\n", [":1: not JSON"]),
    "wrong columns": ("file", rows({"text": "x"}), [":1:", '"prompt"', '"messages"']),
    "both columns": ("file", rows({"prompt": "x", "messages": [USER]}), [":1:", "either"]),
    "a number for a prompt": ("file", rows({"prompt": 3}), [":1:", "a text or a list"]),
    "a prompt of blanks": ("file", rows({"prompt": "  \t"}), [":1:", '"content"']),
    "no messages": ("file", rows({"messages": []}), [":1:", "not empty"]),
    "an unknown role": ("file", rows({"messages": [{"role": "wizard", "content": "x"}]}), [":1:", '"role"']),
    "a message of no text": ("file", rows({"messages": [{"role": "user"}]}), [":1:", '"content"']),
    "a message that is no object": ("file", rows({"messages": ["hello"]}), [":1:", '"role"']),
    "the assistant last": (
        "file", rows({"messages": [USER, {"role": "assistant", "content": "y"}]}), [":1:", "last message"],
    ),
    "a task that is no text": ("file", rows({"prompt": "x", "task": 3}), [":1:", '"task"']),
    "bytes that are no text": ("file", b'{"prompt": "\xff\xfe"}\n', ["cannot be read", "UTF-8"]),
    "UTF-16": ("file", json.dumps({"prompt": "x"}).encode("utf-16"), ["cannot be read", "UTF-8"]),
    "a gzip file": ("file", gzip.compress(b'{"prompt": "x"}'), ["cannot be read"]),
    "half a character": ("file", rows('{"prompt": "\\ud800 alone"}'), [":1:", "half of a character"]),
    "brackets without end": ("file", rows('{"prompt": ' + "[" * 100_000), [":1:"]),
    "digits without end": ("file", rows('{"prompt": ' + "9" * 5000 + "}"), [":1:", "cannot be read"]),
    "one line of 10 MB": ("file", rows({"prompt": "word " * 2_000_000}), ["1,000,000 characters: shorten"]),
    "a single prompt": ("file", rows({"prompt": "Hello"}), ["split", "add prompts"]),
    "copies alone": ("file", rows(*[{"prompt": "Tell me about rivers."}] * 50), ["split", "add prompts"]),
    "near copies alone": (
        "file",
        rows(*[{"prompt": f"Tell me of the long rivers of the old world{'!' * i}"} for i in range(12)]),
        ["split", "add prompts"],
    ),
    "too few prompts for the budget": ("file", rows(*prompts(40)), ["sample.tokens", "add prompts"]),
    "a Parquet file that is none": ("parquet", b"PAR1 not really", ["cannot be read", "Parquet"]),
    "a log of other things": ("log", rows({"event": "x"}, {"body": {"input": "x"}}), ["gives no prompts"]),
    "a log without a question": (
        "log", rows({"messages": [{"role": "system", "content": "Be brief."}]}), ["gives no prompts"],
    ),
    "a log that is no JSON": ("log", b"GET /v1/chat 200\n", [":1: not JSON"]),
    "Spec-Bench without turns": ("specbench", rows({"category": "qa"}), [":1:", '"turns"']),
}  # fmt: skip


@pytest.mark.parametrize("case", PROMPTS)
def test_prompts(case: str, tmp_path: Path, refused: Callable[..., str]) -> None:
    kind, content, words = PROMPTS[case]
    path = tmp_path / ("asked.parquet" if kind == "parquet" else "asked.jsonl")
    path.write_bytes(content)
    kind = "file" if kind == "parquet" else kind
    setting = f"data.prompts=[{{source: '{kind}:{path}'}}]"
    message = refused("sample", mine(tmp_path), "--set", setting, "--set", "sample.tokens=100000")
    assert all(word in message for word in words), message


def test_a_prompt_file_that_is_a_folder_or_missing(tmp_path: Path, refused: Callable[..., str]) -> None:
    for path in (tmp_path, tmp_path / "none.jsonl"):
        message = refused("sample", mine(tmp_path), "--set", f"data.prompts=['file:{path}']")
        assert f"no file {path}" in message
