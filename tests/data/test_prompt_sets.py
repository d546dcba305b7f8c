"""The shipped sets: how many, how different, and which templates are held out."""

import pytest

from data import prompt_sets
from data.prompts import (
    Prompt,
)
from tests.data.prompt_helpers import load


def test_there_are_enough_prompts_tasks_and_templates(builtin: list[Prompt]) -> None:
    assert len({p.messages for p in builtin}) == len(builtin) >= 4000
    assert {p.messages for p in load("builtin:general")} < {p.messages for p in builtin}
    assert len({p.task for p in builtin}) >= 8
    structured = [t for t in prompt_sets.TEMPLATES if t.task in prompt_sets.GROUPS["structured"]]
    held_out = [t for t in structured if t.held_out]
    assert len(structured) >= 28 and len(held_out) >= 8
    assert len({t.task for t in held_out}) >= 4, "held-out templates must not all be of one task"


def test_the_records_are_24_known_templates_of_which_six_are_held_out() -> None:
    prompts = load("builtin:records")
    held_out = {p.template for p in prompts if not p.seen_template}
    assert {p.template for p in prompts} == set(prompt_sets.GROUPS["records"])
    assert (len(prompt_sets.GROUPS["records"]), len(held_out)) == (24, 6)


def test_every_group_task_has_seen_and_held_out_templates() -> None:
    groups = prompt_sets.GROUPS
    for task in (*groups["structured"], *groups["open"], *groups["wide"]):
        kinds = {t.held_out for t in prompt_sets.TEMPLATES if t.task == task}
        assert kinds == {True, False}, task


def test_template_names_are_unique() -> None:
    names = [t.name for t in prompt_sets.TEMPLATES]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("template", prompt_sets.TEMPLATES, ids=lambda t: t.name)
def test_a_template_has_several_phrasings_that_are_all_used(template: prompt_sets.Template) -> None:
    texts = list(prompt_sets.fills(template, 40))
    assert len(template.phrasings) >= 2
    assert len(set(texts)) == 40
    # Every phrasing shows up: the words before its first placeholder, or after its last, find it.
    for phrasing in template.phrasings:
        head, tail = phrasing.split("{")[0], phrasing.rsplit("}")[-1]
        assert any(text.startswith(head) and text.endswith(tail) for text in texts), phrasing


@pytest.mark.parametrize("template", prompt_sets.TEMPLATES, ids=lambda t: t.name)
def test_there_are_enough_different_prompts_and_they_are_short(template: prompt_sets.Template) -> None:
    count = 40 if template.held_out else 240
    texts = list(prompt_sets.fills(template, count))
    assert len(set(texts)) == len(texts) == count
    assert all("{" not in text for text in texts)
    assert all(text.isascii() for text in texts) or template.task == "to_english"
    longest = 170 if template.task == "passage" else 75
    assert all(len(text.split()) < longest for text in texts), "it costs sampling and training time"


def test_fills_that_say_the_same_are_one_prompt() -> None:
    def fill(dice: prompt_sets.template.Dice) -> dict[str, str]:
        return {"said": dice.one(("What?", "what", "Who?", "who")), "unsaid": dice.one("xyz")}

    template = prompt_sets.Template("t", "t", ("{said}", "Briefly: {said}"), fill)
    assert len(list(prompt_sets.fills(template, 2))) == 2  # or one of them would be a twin of the other
    with pytest.raises(AssertionError, match="fewer than 3"):
        list(prompt_sets.fills(template, 3))


def test_no_training_prompt_has_a_twin_among_the_tests() -> None:
    def said(prompt: Prompt) -> str:
        return "".join(letter for letter in prompt.messages[0][1].casefold() if letter.isalnum())

    prompts = load("builtin:qa")
    trained = {said(p) for p in prompts if p.split == "train"}
    asked = {text.removeprefix("inoneortwosentences") for text in trained}
    for prompt in prompts:
        if prompt.split != "train" and prompt.seen_template:
            assert said(prompt).removeprefix("inoneortwosentences") not in asked
