"""Properties of any input, searched by hypothesis: parsers, splits, verification, packing, resume."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.errors import UserError
from data.files import canonical_hash
from data.json_lines import read_json_lines
from data.prompt_sources import parse_source
from data.prompts import Splits, _split_of
from distill.batch_plan import plan_batches
from distill.recipe import load_recipe
from distill.recipe_file import RecipeError, parse_value, read_recipe_text
from distill.redact import redact
from evaluation.decoder.verify import BlockRule, TokenRule
from tests.data.test_sample import ScriptedEngine, contents
from tests.data.test_sample import sample as sample_scripted

quick = settings(
    max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
few = settings(quick, max_examples=8)
YAML_LIKE = st.text("abc: -[]{}#&*!|>'\"\n\t0123456789.~\\%@\x00é", max_size=60)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def written(text: str | bytes) -> Path:
    folder = Path(tempfile.mkdtemp())
    path = folder / "mine.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    return path


# ---- parsers


@quick
@given(YAML_LIKE | st.binary(max_size=60))
def test_any_bytes_are_a_mapping_or_a_recipe_error(text: str | bytes) -> None:
    try:
        assert isinstance(read_recipe_text(written(text)).values, dict)
    except RecipeError as error:
        assert error.problems and "mine" in str(error)


@quick
@given(YAML_LIKE)
def test_any_value_of_an_override_is_read_or_refused(text: str) -> None:
    for use in (parse_value, lambda value: load_recipe("smoke", [f"train.learning_rate={value}"])):
        try:
            use(text)
        except ValueError as error:  # UserError is one
            assert str(error)


@quick
@given(st.lists(JSON, max_size=4), st.booleans())
def test_json_lines_give_back_the_objects_or_name_the_line(values: list[object], mark: bool) -> None:
    text = ("\ufeff" if mark else "") + "".join(json.dumps(value) + "\n" for value in values)
    path = written(text)
    first_odd = next((i for i, value in enumerate(values, 1) if not isinstance(value, dict)), None)
    if first_odd is None:
        assert [row for _, row in read_json_lines(path, "file")] == values
    else:
        with pytest.raises(UserError, match=rf"{path}:{first_odd}: "):
            read_json_lines(path, "file")


@quick
@given(st.text(max_size=40))
def test_any_source_is_known_or_explained(text: str) -> None:
    try:
        assert parse_source(text).place
    except UserError as error:
        assert "file:PATH" in str(error)


@quick
@given(JSON)
def test_equal_objects_have_equal_digests_and_no_others(value: object) -> None:
    again = json.loads(json.dumps(value))
    assert canonical_hash(value) == canonical_hash(again)
    assert canonical_hash([value]) != canonical_hash(value)


@quick
@given(st.text(max_size=30), st.text("abcXYZ019", min_size=16, max_size=30), st.text(max_size=30))
def test_a_token_does_not_survive_redaction(before: str, secret: str, after: str) -> None:
    for token in (f" hf_{secret} ", f" sk-{secret} ", f" Bearer {secret} ", f" https://me:{secret}@host/ "):
        cleaned = redact(before + token + after)
        assert token.strip() not in cleaned
        assert redact(cleaned) == cleaned


# ---- splits


@quick
@given(st.text(min_size=1, max_size=40), st.text(max_size=20), st.floats(0.01, 0.45), st.floats(0.01, 0.45))
def test_the_split_depends_on_the_first_question_alone_and_grows_with_its_share(
    question: str, answer: str, select: float, test: float
) -> None:
    splits = Splits(select=select, test=test)
    asked = (("user", question),)
    later = (*asked, ("assistant", answer), ("user", "and then?"))
    split = _split_of(asked, splits)
    assert split == _split_of(later, splits) == _split_of((("user", f"  {question.upper()} "),), splits) or (
        question.casefold() != question.upper().casefold()
    )
    if split == "test":  # a larger share of tests never sends one back to training
        assert _split_of(asked, Splits(select=select, test=min(0.5, test * 1.5))) == "test"


# ---- verification


@quick
@given(st.data())
def test_drafts_and_the_token_behind_follow_the_targets_law(data: st.DataObject) -> None:
    """One draft, enumerated: P(x) = draft(x) accept(x) + P(rejected) residual(x) = target(x), in float64."""
    size = data.draw(st.integers(2, 5))
    weights = st.lists(st.integers(0, 20), min_size=size, max_size=size).filter(any)
    rows = [torch.tensor(data.draw(weights), dtype=torch.float64) for _ in range(3)]
    target, bonus, draft = (row / row.sum() for row in rows)
    for rule in (TokenRule(), BlockRule()):
        law = torch.zeros(size, dtype=torch.float64)
        drafted = torch.arange(size)[:, None]
        one = torch.ones(size, dtype=torch.int64)
        target_probs = torch.stack([target, bonus]).expand(size, 2, size)
        draft_probs = draft.expand(size, 1, size)
        accept = rule.accept_probabilities(target_probs, draft_probs, drafted, one)[:, 0]
        following = rule.next_token_probs(target_probs, draft_probs, drafted, torch.zeros_like(one), one)
        possible = draft > 0
        assert ((accept[possible] >= 0) & (accept[possible] <= 1 + 1e-12)).all()
        law = torch.where(possible, draft * accept, 0)
        rejected = torch.where(possible, draft * (1 - accept), 0)
        law = law + (rejected[:, None] * following).sum(dim=0)
        assert torch.allclose(law, target, atol=1e-12)


# ---- packing


@quick
@given(
    st.lists(st.tuples(st.integers(2, 60), st.integers(1, 40)), min_size=1, max_size=40),
    st.integers(1, 7), st.integers(1, 400), st.integers(1, 3), st.integers(1, 3), st.integers(0, 99),
)  # fmt: skip
def test_a_plan_meets_its_budget_in_whole_steps_and_uses_every_sample_alike(
    sizes: list[tuple[int, int]], batch_size: int, tokens: int, accumulation: int, processes: int, seed: int
) -> None:
    plan = plan_batches(sizes, batch_size=batch_size, tokens=tokens, accumulation=accumulation, seed=seed)
    assert len(plan.batches) == plan.steps * accumulation
    assert all(0 < len(batch) <= batch_size and len(set(batch)) == len(batch) for batch in plan.batches)
    assert sum(plan.tokens) >= tokens
    assert sum(plan.tokens[:-accumulation]) < tokens, "no step more than needed"
    counts = [sum(batch.count(index) for batch in plan.batches) for index in range(len(sizes))]
    assert max(counts) - min(counts) <= 1
    shares = plan.shares(processes)
    dealt = [shares[start : start + processes] for start in range(0, len(shares), processes)]
    whole = [sorted(index for part in parts for index in part) for parts in dealt]
    assert whole == [sorted(batch) for batch in plan.batches]


# ---- resume


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> object:
    folder = tmp_path_factory.mktemp("straight")
    sample_scripted(folder, ScriptedEngine())
    return contents(folder)


@few
@given(stops=st.lists(st.integers(0, 200), max_size=3))
def test_samples_do_not_depend_on_where_sampling_was_stopped(straight: object, stops: list[int]) -> None:
    with tempfile.TemporaryDirectory() as place:
        for stop in stops:
            try:
                sample_scripted(Path(place), ScriptedEngine(fail_after=stop))
            except KeyboardInterrupt:
                continue
        sample_scripted(Path(place), ScriptedEngine())
        assert contents(Path(place)) == straight
