"""The bench of training: arms that take the same step, in processes of their own."""

import os

import pytest
import torch

from distill import cli
from distill.bench import training_arms
from distill.bench.training import ARMS, CURVE_ARMS, WANTED, Shape, in_a_process, ratios, report
from distill.bench.training_arms import Peak, Step, loss_peak, train_steps

TINY = Shape(
    vocab_size=300,
    hidden_size=24,
    intermediate_size=48,
    heads=3,
    target_layers=3,
    draft_layers=1,
    rows=3,
    prompt=4,
    completion=7,
)


def test_all_arms_take_the_same_step() -> None:
    steps = {name: Step(name, TINY) for name in ARMS}
    losses = {name: step.loss(TINY.rows) for name, step in steps.items()}
    wanted = losses["gkd"].item()
    assert wanted > 0
    gradients = {}
    for name, loss in losses.items():
        assert loss.item() == pytest.approx(wanted, rel=1e-3), name
        loss.backward()
        head = steps[name].drafter.lm_head.weight.grad
        assert head is not None
        gradients[name] = head
    for name in ARMS:
        torch.testing.assert_close(gradients[name], gradients["gkd"], rtol=1e-3, atol=1e-5, msg=name)
    assert not hasattr(steps["ours_hidden"], "target")  # cached states need no target


def test_what_an_arm_reports() -> None:
    done = train_steps("ours", TINY)
    assert done["tokens_per_second"] > 0 and done["total_mib"] >= done["peak_mib"] >= 0
    arms = {name: {**done, "peak_mib": 10.0 + number} for number, name in enumerate(ARMS)}
    assert set(ratios(arms)) == set(WANTED)
    assert ratios(arms)["memory_vs_gkd"] == pytest.approx(12 / 10)
    found = {
        "shape": vars(TINY),
        "environment": {"gpu": "", "cpu": "a processor", "commit": "abc"},
        "arms": {"300": arms},
        "ratios": {"300": ratios(arms)},
        "curve": [{"vocabulary": 300, "tokens": 5, **dict.fromkeys(CURVE_ARMS, 1.0)}],
    }
    text = report(found)
    assert "memory_vs_gkd: 1.20 (wanted: at most 0.3)" in text and "300 ids, 5 tokens: gkd 1" in text


def test_the_peak_is_seen() -> None:
    peak = Peak("cpu")
    before = peak.above()
    held = torch.ones(64 << 20, dtype=torch.uint8)  # too large to be served from memory that was freed before
    del held
    assert 60 < peak.above() - before < 90


def test_the_loss_alone_is_measured_for_every_kernel() -> None:
    for name in CURVE_ARMS:
        assert loss_peak(name, TINY, 9) >= 0


def fail() -> None:
    os._exit(7)


def test_an_arm_that_dies_is_a_fault() -> None:
    assert in_a_process(os.getpid) != os.getpid()
    with pytest.raises(RuntimeError, match="exit code 7"):
        in_a_process(fail)


def test_a_recipe_has_no_place_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "training", "smoke"]) == 2
    assert "leave the recipe out" in capsys.readouterr().err


@pytest.mark.slow
def test_memory_does_not_grow_with_vocabulary_times_tokens() -> None:
    """Four times the tokens over a real vocabulary: full logits grow with them, ours do not."""
    grown = {}
    for name in ("gkd", "ours"):
        few, many = (in_a_process(training_arms.loss_peak, name, Shape(49_152), n) for n in (400, 1600))
        grown[name] = many - few
    logits = 1200 * 49_152 * 4 / (1 << 20)
    assert grown["gkd"] > 2 * logits and grown["ours"] < 0.3 * logits
