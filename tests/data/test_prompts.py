"""The same prompts in the same splits, and as many as are asked for."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from data import prompt_sets
from data.prompts import (
    Prompt,
    Splits,
    prompts_digest,
)
from tests.data.prompt_helpers import OPEN, STRUCTURED, WIDE, load


def test_the_same_call_gives_the_same_prompts(builtin: list[Prompt]) -> None:
    assert load(STRUCTURED, OPEN, WIDE) == builtin


def test_another_process_with_another_hash_seed_gives_the_same_digest(builtin: list[Prompt]) -> None:
    code = (
        "from data.prompts import *\n"
        f"sources = [PromptSource(source=s) for s in ({STRUCTURED!r}, {OPEN!r}, {WIDE!r})]\n"
        "print(prompts_digest(load_prompts(sources, splits=Splits(), seed=0)))"
    )
    root = Path(__file__).parents[2]
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)},
            check=True, capture_output=True, text=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }  # fmt: skip
    assert digests == {prompts_digest(builtin)}


def test_heavy_libraries_are_not_imported() -> None:
    heavy = ("torch", "transformers", "datasets")
    code = f"import sys, data.prompts; print([m for m in {heavy} if m in sys.modules])"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


def test_held_out_templates_are_test_only(builtin: list[Prompt]) -> None:
    held_out = {t.name for t in prompt_sets.TEMPLATES if t.held_out}
    for p in builtin:
        assert p.seen_template is (p.template not in held_out)
        assert p.seen_template or p.split == "test"
    assert {p.template for p in builtin if not p.seen_template} == held_out


def test_splits_share_neither_ids_nor_texts(builtin: list[Prompt]) -> None:
    by_split: dict[str, set[tuple[str, object]]] = {}
    for p in builtin:
        by_split.setdefault(p.split, set()).update({("id", p.id), ("text", p.messages)})
    assert set(by_split) == {"train", "select", "test"}
    assert (
        sum(len(items) for items in by_split.values())
        == len(set().union(*by_split.values()))
        == 2 * len(builtin)
    )


def test_the_shares_are_about_those_that_were_asked_for(builtin: list[Prompt]) -> None:
    counts = Counter(p.split for p in builtin if p.seen_template)
    total = sum(counts.values())
    assert counts["test"] / total == pytest.approx(0.1, abs=0.02)
    assert counts["select"] / total == pytest.approx(0.05, abs=0.015)


def test_the_split_depends_on_the_text_alone(builtin: list[Prompt]) -> None:
    split = {p.messages: (p.split, p.seen_template) for p in builtin}
    others = [
        load(OPEN, {"source": STRUCTURED, "count": 77}, seed=5),
        load("builtin:json"),
        load("builtin:math", seed=3),
    ]
    for p in (p for prompts in others for p in prompts):
        assert split[p.messages] == (p.split, p.seen_template)


def test_a_near_copy_falls_into_the_same_split(write: Callable[..., str]) -> None:
    rows = [f"Write line {i} about rivers" for i in range(200)]
    plain = load("file:" + write(*({"prompt": row} for row in rows), name="a.jsonl"))
    copies = load(
        "file:" + write(*({"prompt": row.upper().replace(" ", "  ")} for row in rows), name="b.jsonl")
    )
    key = {" ".join(p.messages[0][1].split()).casefold(): p.split for p in copies}
    assert {p.messages[0][1].casefold(): p.split for p in plain} == key
    assert len(set(key.values())) == 3


def test_splits_are_checked() -> None:
    with pytest.raises(ValidationError, match="below 1"):
        Splits(select=0.5, test=0.5)
    for share in (-0.1, 0):
        with pytest.raises(ValidationError):
            Splits(test=share)
    with pytest.raises(ValidationError, match="trian"):
        Splits.model_validate({"trian": 0.8})
    seen = [p for p in load("builtin:sql", splits=Splits(select=0.5, test=0.49)) if p.seen_template]
    assert sum(p.split == "train" for p in seen) < len(seen) / 20


@pytest.mark.parametrize("count", [50, 300])
def test_count_is_spread_evenly_over_the_seen_templates(count: int) -> None:
    prompts = load({"source": STRUCTURED, "count": count})
    seen = Counter(p.template for p in prompts if p.seen_template)
    assert sum(seen.values()) == count
    assert max(seen.values()) - min(seen.values()) <= 1
    assert len(seen) == len(
        [t for t in prompt_sets.TEMPLATES if t.task in prompt_sets.GROUPS["structured"] and not t.held_out]
    )


def test_held_out_prompts_come_on_top_of_count() -> None:
    small = Counter(p.template for p in load({"source": STRUCTURED, "count": 10}) if not p.seen_template)
    assert set(small.values()) == {4}
    large = [p for p in load({"source": STRUCTURED, "count": 1000}) if not p.seen_template]
    assert len(large) == 100


def test_a_small_count_still_gives_select_and_test_their_shares() -> None:
    counts = Counter(p.split for p in load({"source": STRUCTURED, "count": 300}) if p.seen_template)
    assert 0.06 <= counts["test"] / 300 <= 0.15
    assert 0.02 <= counts["select"] / 300 <= 0.10


def test_a_smaller_count_is_part_of_a_larger_one_and_the_seed_chooses() -> None:
    few = {p.id for p in load({"source": STRUCTURED, "count": 50}) if p.seen_template}
    many = {p.id for p in load({"source": STRUCTURED, "count": 200}) if p.seen_template}
    other = {p.id for p in load({"source": STRUCTURED, "count": 50}, seed=1) if p.seen_template}
    assert few < many
    assert other != few


def test_every_prefix_mixes_the_sources() -> None:
    first = load({"source": STRUCTURED, "count": 100}, {"source": OPEN, "count": 100})[:20]
    assert {p.source for p in first} == {STRUCTURED, OPEN}


def test_the_digest_sees_content_order_and_split(builtin: list[Prompt]) -> None:
    few = builtin[:5]
    assert prompts_digest(few) == prompts_digest(list(few))
    assert prompts_digest(few) != prompts_digest(few[::-1])
    assert prompts_digest(few) != prompts_digest(builtin[:4])
