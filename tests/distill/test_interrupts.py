"""Signals: the first one ends the work in order, a step finished first, the second one ends the process."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from data.records import Samples
from distill import interrupts
from distill.interrupts import Interrupted
from distill.models import Target
from tests.distill.training import new_drafter, train


def test_a_deferred_signal_waits_for_the_end_of_the_block() -> None:
    done = []
    with interrupts.handled(), pytest.raises(Interrupted) as caught:
        with interrupts.deferred() as asked:
            assert not asked()
            os.kill(os.getpid(), signal.SIGTERM)
            done.append(asked())
        done.append(0)
    assert done == [signal.SIGTERM] and caught.value.exit_code == 143
    with interrupts.handled(), pytest.raises(Interrupted) as caught:  # nothing waits from before
        os.kill(os.getpid(), signal.SIGINT)
    assert caught.value.exit_code == 130


def test_a_block_may_be_asked_to_end_by_another_process() -> None:
    with pytest.raises(Interrupted) as caught, interrupts.deferred() as asked:
        interrupts.ask(signal.SIGTERM)
        interrupts.ask(signal.SIGINT)  # the first one counts
        assert asked() == signal.SIGTERM
    assert caught.value.exit_code == 143
    with interrupts.deferred() as asked:
        assert not asked(), "nothing waits from before"


def test_the_second_signal_is_not_held_back() -> None:
    child = os.fork()
    if not child:
        with interrupts.handled(), interrupts.deferred():
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM


def test_training_finishes_the_step_saves_and_goes_on_with_the_same_bits(
    target: Target, make_samples: Callable[..., Samples], tmp_path: Path
) -> None:
    samples = make_samples(20)
    straight = train(new_drafter(target), target, samples, tmp_path / "straight")
    steps: list[int] = []

    def report(step: int, *_: object) -> None:
        steps.append(step)
        if len(steps) == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    with interrupts.handled(), pytest.raises(Interrupted):
        train(new_drafter(target), target, samples, tmp_path / "stopped", report=report)
    assert steps == [1, 2, 3, 4], "no step after the signal"
    assert (tmp_path / "stopped" / "checkpoints" / "checkpoint-4" / "complete.json").is_file()
    resumed = train(new_drafter(target), target, samples, tmp_path / "stopped", report=report)
    assert steps[4] == 5, "no step twice"
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
    folders = (tmp_path / run / "drafter" for run in ("straight", "stopped"))
    ours, theirs = (load_file(folder / "model.safetensors") for folder in folders)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
