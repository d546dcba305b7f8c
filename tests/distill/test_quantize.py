"""Quantised targets and 8-bit optimizers, for real on a CPU."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from data.errors import UserError
from data.records import Samples
from distill.drafter import DraftConfig, InitConfig, build_drafter
from distill.models import Target, TargetConfig, load_target
from distill.pipeline import run
from distill.preflight import check
from distill.quantize import check_here, missing
from distill.recipe import load_recipe
from distill.sizes import Sizes, memory_needed
from evaluation.decoder.drafters import DraftModel
from evaluation.quantization import acceptance_gap
from tests.distill.training import new_drafter, train

BITS = {"nf4": 4, "int8": 8}


def test_what_cannot_work_here_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing("nf4", "adamw_8bit", has_gpu=False) is None
    assert missing("none", "paged_adamw_8bit", has_gpu=True) is None
    with pytest.raises(UserError, match=r"paged_adamw_8bit pages to and from a GPU"):
        check_here("none", "paged_adamw_8bit", has_gpu=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"target\.quantization=nf4 needs the package bitsandbytes"):
        check_here("nf4", "adamw", has_gpu=True)
    check_here("none", "adamw", has_gpu=False)  # nothing is needed then


def test_preflight_refuses_before_anything_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import distill.preflight

    monkeypatch.setattr(distill.preflight, "gpu", lambda: None)
    findings = check(load_recipe("smoke", ["train.optimizer=paged_adamw_8bit"]), tmp_path)
    assert findings.blocked and "adamw_8bit" in findings.text()
    assert not check(load_recipe("smoke", ["train.optimizer=adamw_8bit"]), tmp_path).blocked


def test_quantised_weights_count_as_such() -> None:
    sizes = Sizes(8_000_000_000, 1_000, 4096, 4096)
    needed = {
        name: memory_needed(load_recipe("smoke", [f"target.quantization={name}"]), sizes)
        for name in ("none", "int8", "nf4")
    }
    per_parameter = {name: (needed["none"] - found) / (1.1 * sizes.target) for name, found in needed.items()}
    assert per_parameter == {"none": 0, "int8": pytest.approx(3), "nf4": pytest.approx(4 - 0.57)}


@pytest.mark.parametrize("name", BITS)
def test_a_target_is_rounded_but_for_embeddings_and_head(
    name: str, tiny_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    full = load_target(TargetConfig(model=str(tiny_pair[0])), tmp_path, "cpu")
    config = TargetConfig.model_validate({"model": str(tiny_pair[0]), "quantization": name})
    rounded = load_target(config, tmp_path, "cpu")
    assert rounded.name.endswith(f"({name})") and rounded.digest == full.digest
    assert rounded.model.dtype == torch.float32 and rounded.model.device.type == "cpu"
    layer = rounded.model.model.layers[0].mlp.up_proj.weight
    numbers = full.model.model.layers[0].mlp.up_proj.weight.numel()
    assert layer.numel() * layer.element_size() * 8 == numbers * BITS[name]
    assert torch.equal(rounded.model.lm_head.weight, full.model.lm_head.weight)
    ids = torch.arange(20, 60).unsqueeze(0)
    with torch.no_grad():
        ours, theirs = (each.model(ids).logits.log_softmax(-1) for each in (rounded, full))
    distance = (ours.exp() - theirs.exp()).abs().sum(-1).mean() / 2
    assert 0 < distance < (0.35 if name == "nf4" else 0.1)  # near, and not the same


def test_a_drafter_is_cut_out_of_the_full_target(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    config = TargetConfig(model=str(tiny_pair[0]), quantization="nf4")
    target = load_target(config, tmp_path, "cpu")
    full = load_target(TargetConfig(model=str(tiny_pair[0])), tmp_path, "cpu")
    draft = DraftConfig(init=InitConfig(**{"from": "target"}, layers=[1]))
    counts = torch.ones(target.model.config.vocab_size, dtype=torch.int64)
    drafter = build_drafter(draft, target, counts, tmp_path, lambda name: Path(name))
    cut = drafter.model.model.layers[0].mlp.up_proj.weight
    assert torch.equal(cut, full.model.model.layers[1].mlp.up_proj.weight)


def test_the_gap_is_paired_and_zero_for_the_same_target(
    target: Target, make_samples: Callable[..., Samples], make_llama: Any
) -> None:
    samples, drafter = make_samples(12), new_drafter(target)
    same = acceptance_gap(drafter, target.model, target.model, samples, temperature=1.0, seed=0)
    assert same["tokens"] == samples.completion_tokens and same["samples"] == len(samples)
    assert same["targets"]["sampled"] == pytest.approx(1, abs=1e-5) and same["targets"]["greedy"] == 1
    for name in ("sampled", "argmax", "greedy"):
        assert same[name]["gap"] == {"mean": 0, "low": 0, "high": 0}
    other = make_llama(7)
    found = acceptance_gap(DraftModel(other, None), other, target.model, samples, temperature=1.0, seed=0)
    assert found["sampled"]["quantised"] == pytest.approx(1, abs=1e-5)
    gap = found["sampled"]["gap"]
    assert gap["mean"] == pytest.approx(1 - found["sampled"]["full"], abs=1e-5)
    assert 0 < gap["low"] <= gap["mean"] <= gap["high"] and found["targets"]["greedy"] < 1


def test_adamw_8bit_keeps_its_moments_in_bytes_and_trains_alike(
    target: Target, make_samples: Callable[..., Samples], tmp_path: Path
) -> None:
    from bitsandbytes.optim import GlobalOptimManager

    samples = make_samples(12)
    before = {name: value.clone() for name, value in new_drafter(target).model.state_dict().items()}
    full = train(new_drafter(target), target, samples, tmp_path / "full", tokens=200)
    few = train(new_drafter(target), target, samples, tmp_path / "8", tokens=200, optimizer="adamw_8bit")
    assert GlobalOptimManager.get_instance() is not None
    for name, value in full.items():
        moved = (value - before[name]).norm()
        # small tensors keep 32-bit moments in bitsandbytes, and its fused step rounds otherwise
        assert (few[name] - value).norm() <= 0.1 * moved, name


@pytest.mark.slow
def test_a_whole_run_on_a_quantised_target(tmp_path: Path) -> None:
    small = [
        "target.quantization=nf4",
        "train.optimizer=adamw_8bit",
        "sample.tokens=400",
        "train.tokens=400",
        "evaluate={prompts: 2, num_speculative_tokens: [2], max_new_tokens: 6}",
        "data.prompts=[{source: builtin:structured, count: 120}]",
    ]
    result = run(load_recipe("smoke", small), tmp_path, "run", fresh=False, say=lambda text: None)
    sample = result.outcomes["sample"].stage
    assert sample.inputs()["config"]["quantization"] == "nf4"
    plain = run(load_recipe("smoke", small[2:]), tmp_path, "sample", fresh=False, say=lambda text: None)
    assert plain.outcomes["sample"].stage.key != sample.key
    evaluation = result.read("evaluate", "evaluation.json")
    assert evaluation is not None
    gap = evaluation["quantization"]["sampled"]
    assert gap["gap"]["mean"] == pytest.approx(gap["quantised"] - gap["full"], abs=1e-6)
    assert 0 < evaluation["quantization"]["targets"]["sampled"] < 1

    card = (result.outcomes["export"].stage.directory / "hf" / "README.md").read_text()
    assert "quantised to nf4" in card

    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("random:1 (nf4)") or next(
        each for each in client.search_experiments() if "nf4" in each.name
    )
    logged = client.search_runs([experiment.experiment_id])
    assert any(each.data.params.get("target.quantization") == "nf4" for each in logged)
    assert any("quantization/sampled_gap" in each.data.metrics for each in logged)
