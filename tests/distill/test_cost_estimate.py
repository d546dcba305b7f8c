"""The cost of a draft step before training: right shapes, a sentence, and nothing loaded without a target."""

from pathlib import Path
from typing import Any

import pytest

from distill import cost_estimate
from distill.cost_estimate import describe, estimate, measure
from distill.recipe import load_recipe
from distill.resolve import find_model, resolve_model


def test_without_a_target_nothing_is_measured(tmp_path: Path) -> None:
    found = estimate(load_recipe("smoke"), tmp_path)
    assert found.level == "note" and "once the target is on this machine" in found.text
    assert list(tmp_path.iterdir()) == []


def test_costs_of_the_recipes_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = ["serving.batch_size=2", "evaluate.prompts=10"]
    recipe = load_recipe("smoke", ["draft.init.width=32", *batch])
    folder = resolve_model(recipe.target.model, None, tmp_path)
    assert find_model(recipe.target.model, None, tmp_path) == folder
    made: list[Any] = []
    original = cost_estimate._random_model

    def spy(*arguments: Any) -> Any:
        made.append(original(*arguments))
        return made[-1]

    monkeypatch.setattr(cost_estimate, "_random_model", spy)
    costs = measure(recipe, folder, folder)
    drafter, target = (model.config for model in made)
    assert (drafter.num_hidden_layers, drafter.hidden_size) == (2, 32)
    assert (target.num_hidden_layers, target.hidden_size) == (4, 64)
    assert [model.lm_head.weight.shape[0] for model in made] == [256, 384]
    assert costs["batch_size"] == 2 and set(costs["break_even"]) == {2, 4}
    assert costs["cost_ratio"] == costs["draft_step_ms"] / costs["target_step_ms"]
    assert "at batch 2 (c = " in estimate(recipe, tmp_path).text


def test_the_sentence() -> None:
    costs = {"draft_step_ms": 4.0, "target_step_ms": 30.0, "batch_size": 1, "cost_ratio": 4 / 30}
    text = describe({**costs, "break_even": {3: 0.314, 8: None}})
    assert "4.0 ms, a target step 30.0 ms at batch 1 (c = 0.13" in text
    assert "K 3 from acceptance 0.31 on, K 8 never pays" in text
