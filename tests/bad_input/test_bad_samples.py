"""Answers that are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.bad_input.recipes import FEW, mine


def answers(requests: Path, **choice: Any) -> str:
    """A batch's answers to a file of requests, each with `choice` in place of a good one's."""
    lines = []
    for line in requests.read_text().splitlines():
        asked = json.loads(line)
        good = {"finish_reason": "stop", "token_ids": [40, 41, 2], "text": "ab", **choice}
        lines.append(json.dumps({"custom_id": asked["custom_id"], "response": {"body": {"choices": [good]}}}))
    return "\n".join(lines)


ANSWERS: dict[str, tuple[dict[str, Any] | str, list[str]]] = {
    "ids out of range": ({"token_ids": [40, 99999]}, ["outside the target's vocabulary of 384"]),
    "negative ids": ({"token_ids": [-1, 2]}, ["outside the target's vocabulary"]),
    "ids that are text": ({"token_ids": ["a"]}, ["no token id"]),
    "empty answers": ({"token_ids": [], "finish_reason": "length"}, ["0 tokens", "were asked for"]),
    "answers that are too long": ({"token_ids": [40] * 99, "finish_reason": "length"}, ["99 tokens"]),
    "text behind the end": ({"token_ids": [2, 40, 2]}, ["behind an end-of-sequence token"]),
    "answers that were filtered": ({"finish_reason": "content_filter"}, ["content_filter"]),
    "no file of answers": ("", ["run the requests in", "run the same command again"]),
    "another batch's answers": ('{"custom_id": "other", "response": {}}', ["another batch's"]),
    "answers that are no JSON": ("<html>busy</html>", [":1: not JSON"]),
    "answers that are a list": ("[1]", [":1:", "JSON object"]),
}  # fmt: skip


@pytest.mark.parametrize("case", ANSWERS)
def test_answers(case: str, tmp_path: Path, runs: Path, refused: Callable[..., str]) -> None:
    given, words = ANSWERS[case]
    path = mine(tmp_path, FEW.replace("engine: builtin", "engine: batch\n  endpoint: {model: x}"))
    settings = ["train.signal=live", f"seed={sorted(ANSWERS).index(case) + 100}"]
    command = ["sample", path, *(word for text in settings for word in ("--set", text))]
    message = refused(*command)
    (asked,) = [file for file in runs.glob("mine/*/batch/requests-1.jsonl") if str(file) in message]
    if given:
        text = given if isinstance(given, str) else answers(asked, **given)
        asked.with_name("answers-1.jsonl").write_text(text)
    message = refused(*command)
    assert all(word in message for word in words), message
