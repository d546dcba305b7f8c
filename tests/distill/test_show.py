"""`distill show`: the sample that training sees, cut where training begins."""

import json
from pathlib import Path
from typing import Any

import pytest

from data.errors import UserError
from data.records import SampleRecord
from data.sample_summary import summarise
from distill.pipeline import run
from distill.recipe import Recipe, load_recipe
from distill.show import pieces_of, render, show
from tests.data.test_records import record

SMALL = ["sample.tokens=200", "evaluate.prompts=2", "data.prompts=[{source: builtin:structured, count: 120}]"]


def quiet(text: str) -> None:
    pass


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, Path]:
    recipe, runs = load_recipe("smoke", SMALL), tmp_path_factory.mktemp("runs")
    run(recipe, runs, "sample", fresh=False, say=quiet)
    return recipe, runs


def test_the_answer_is_marked_from_its_first_token_to_its_end(sampled: tuple[Recipe, Path]) -> None:
    recipe, runs = sampled
    answer = show(recipe, runs, 0, quiet)
    prompt, completion = answer["pieces"]
    assert (prompt["trained"], completion["trained"]) == (False, True)
    assert prompt["text"].endswith("<|im_start|>assistant\n")
    assert len(completion["ids"]) == answer["trained_tokens"] == 16
    text = render(answer)
    assert "16 tokens, trained" in text and "cut at max_new_tokens" in text
    assert "tasks: class " in text and "entropy of the target's choices" in text
    page = Path(answer["page"])
    assert f"page: {page}" in text and "<svg" in page.read_text()
    manifest = json.loads((page.parent / "manifest.json").read_text())
    assert {"samples.html", "samples.json"} < manifest["files"].keys()
    assert show(recipe, runs, -1, quiet)["index"] == answer["samples"] - 1


def test_what_is_not_there_is_said(sampled: tuple[Recipe, Path], tmp_path: Path) -> None:
    recipe, runs = sampled
    with pytest.raises(UserError, match=r"numbered 0 to \d+"):
        show(recipe, runs, 10**6, quiet)
    with pytest.raises(UserError, match="run `distill sample smoke`"):
        show(recipe, tmp_path, 0, quiet)


class Letters:
    def decode(self, ids: list[int]) -> str:
        return "".join(chr(96 + token) for token in ids)


def test_a_mask_in_several_parts_is_shown_as_it_is() -> None:
    mixed: SampleRecord = record([1, 2, 3, 4, 5], 2)
    mixed.completion_mask = [False, True, True, False, True]
    pieces = pieces_of(mixed, Letters())
    assert [(piece.trained, piece.text) for piece in pieces] == [
        (False, "a"), (True, "bc"), (False, "d"), (True, "e")
    ]  # fmt: skip


def test_an_end_that_is_not_trained_is_shouted(tmp_path: Path) -> None:
    answer: dict[str, Any] = {
        "index": 0, "samples": 1, "split": "train", "task": "t", "template": "t", "seen_template": False,
        "temperature": 0.0, "finish_reason": "stop", "reencoded": True, "ends_with_trained_eos": False,
        "pieces": [{"trained": True, "ids": [1, 2], "tokens": ["a", "\n"], "text": "a\n"}],
        "summary": summarise(tmp_path), "page": None,
    }  # fmt: skip
    text = render(answer)
    assert "WITHOUT A TRAINED EOS" in text and "ENCODED AGAIN" in text and "held out" in text
    assert "|a|\\n\n|" in text
    assert "WITHOUT" not in render({**answer, "ends_with_trained_eos": True})
