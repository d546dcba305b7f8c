"""The shipped sets: how many, how different, and which templates are held out."""

import pytest

from data import prompt_sets
from data.prompts import (
    Prompt,
)
from tests.data.prompt_helpers import load


def test_there_are_enough_prompts_tasks_and_templates(builtin: list[Prompt]) -> None:
    assert len({p.messages for p in builtin}) == len(builtin) >= 4000
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
    for task in (*prompt_sets.GROUPS["structured"], *prompt_sets.GROUPS["open"]):
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
def test_every_phrasing_says_the_whole_content_that_makes_a_fill_distinct(
    template: prompt_sets.Template,
) -> None:
    # Two fills that differ only in a value that a phrasing leaves out would be one prompt.
    texts = list(prompt_sets.fills(template, 40 if template.held_out else 240))
    assert len(set(texts)) == len(texts)
    assert all("{" not in text and text.isascii() for text in texts)
    assert all(len(text.split()) < 75 for text in texts), "a long prompt costs sampling and training time"
