"""Adapters: they start at zero, train alone, and a saved drafter holds their sum."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from data.errors import UserError
from data.records import Samples
from distill.lora import LoraConfig, add_lora, merged, remove_lora
from distill.models import Target, load_drafter
from tests.distill.training import Killed, new_drafter, train

CONFIG = LoraConfig(rank=4, alpha=8)


def test_without_peft_it_is_one_sentence(
    target: Target, make_samples: Callable[..., Samples], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install -e '\.\[lora\]'"):
        train(new_drafter(target), target, make_samples(6), tmp_path, lora={"rank": 4})


def test_the_merged_weights_are_the_models_function(target: Target) -> None:
    pytest.importorskip("peft")
    model, ids = new_drafter(target).model, torch.arange(3, 40).unsqueeze(0)
    names = list(model.state_dict())
    before = model(ids).logits
    add_lora(model, CONFIG, seed=0)
    torch.testing.assert_close(model(ids).logits, before)  # they begin with zero
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained and all(".lora_" in name for name in trained)
    assert not any("lm_head" in name for name in trained)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B" in name:
                parameter.normal_(std=0.1)
    with_adapters = model(ids).logits
    assert not torch.allclose(with_adapters, before)
    weights = merged(model.state_dict(), CONFIG)
    remove_lora(model, CONFIG)
    assert list(model.state_dict()) == names == list(weights)
    torch.testing.assert_close(model(ids).logits, with_adapters, rtol=1e-4, atol=1e-4)


def test_training_adapters_resumes_with_the_same_bits(
    target: Target, make_samples: Callable[..., Samples], tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    samples = make_samples(20)
    fields: dict[str, Any] = {"tokens": 600, "lora": {"rank": 4, "alpha": 8}, "learning_rate": 1e-2}
    drafter = new_drafter(target)
    before = {name: value.clone() for name, value in drafter.model.state_dict().items()}
    straight = train(drafter, target, samples, tmp_path / "straight", **fields)
    assert list(straight) == list(before)
    moved = {name for name, value in straight.items() if not torch.equal(value, before[name])}
    assert moved and all("_proj" in name for name in moved)
    kept = load_drafter(tmp_path / "straight" / "drafter", "cpu").model.state_dict()
    assert list(kept) == list(before)

    def report(step: int, steps: int, tokens: int, measures: dict[str, float]) -> None:
        if step == 11:
            raise Killed

    with pytest.raises(Killed):
        train(new_drafter(target), target, samples, tmp_path / "killed", report=report, **fields)
    resumed = train(new_drafter(target), target, samples, tmp_path / "killed", **fields)
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
