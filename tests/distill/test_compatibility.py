"""What is found before any work: positions that a pair lacks."""

import pytest

from distill.compatibility import _positions
from distill.recipe import load_recipe

SMALL = ["data.max_prompt_tokens=64", "evaluate.num_speculative_tokens=[8]"]


@pytest.mark.parametrize(
    ("sets", "needed"),
    [
        (["sample.max_new_tokens=8", "evaluate.max_new_tokens=32"], 64 + 32 + 8 + 1),
        (["sample.max_new_tokens=8", "evaluate.max_new_tokens=32", "evaluate.tree=true"], 64 + 32 + 16 + 1),
        (["sample.max_new_tokens=64", "evaluate.max_new_tokens=8"], 64 + 64),
        (
            ["sample.max_new_tokens=64", "evaluate.max_new_tokens=8", "train.on_policy={share: 0.5}"],
            64 + 64 + 1,
        ),
    ],
)
def test_trees_and_rollouts_count_what_they_read(sets: list[str], needed: int) -> None:
    recipe = load_recipe("smoke", [*SMALL, *sets])
    assert _positions(recipe, "target", needed) == []
    (problem,) = _positions(recipe, "target", needed - 1)
    assert f"need {needed} positions, but the target has {needed - 1}" in problem
