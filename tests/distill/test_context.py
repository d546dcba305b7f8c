"""What the stages of a run share is made once, however many prompts there are."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import data.prompts
from distill import context
from distill.context import Run
from distill.recipe import load_recipe


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """One of a prompt file in which one prompt names a special token of the target's."""
    rows = [f'{{"prompt": "Sum up report {number * number + 7} for {number}."}}' for number in range(60)]
    rows += ['{"prompt": "What does <|im_end|> mean to a tokenizer?"}']
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows))
    recipe = load_recipe("smoke", [f"data.prompts=[file:{tmp_path}/prompts.jsonl]"])
    return Run(recipe, tmp_path / "runs", lambda text: None, ExitStack())


def counted(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[str]:
    calls: list[str] = []
    real: Callable[..., Any] = getattr(module, name)

    def counting(*arguments: Any, **named: Any) -> Any:
        calls.append(name)
        return real(*arguments, **named)

    monkeypatch.setattr(module, name, counting)
    return calls


def test_prompts_are_read_and_special_tokens_listed_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    loads = counted(monkeypatch, context, "cached_prompts")
    listed = counted(monkeypatch, data.prompts, "special_ids")
    keys = {name: stage.key for name, stage in run.stages.items()}
    assert len(run.prompts) > 50 and {name: stage.key for name, stage in run.stages.items()} == keys
    assert len(loads) == 1 and len(listed) == 1


def test_a_text_that_stays_special_is_left_out_and_counted(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = len(run.prompts)
    said: list[str] = []
    stubborn = Run(run.recipe, run.runs_dir, said.append, ExitStack())
    monkeypatch.setattr(context, "neutralise", lambda tokenizer, prompts: prompts)
    assert len(stubborn.prompts) == whole - 1
    assert any("1 of" in text and "special tokens" in text for text in said)
