"""Killed and started again: the same bits as a straight run."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM, TrainerCallback

from data.records import Samples
from distill.models import Target
from evaluation.decoder.drafters import DraftModel
from tests.distill.training import Killed, ignore, new_drafter, run_with_callback, train


def test_a_killed_run_ends_with_the_same_bits(
    target: Target, make_samples: Callable[..., Samples], tmp_path: Path
) -> None:
    samples = make_samples(20)
    fields: dict[str, Any] = {"tokens": 600, "accumulation": 2, "batch_size": 2}
    straight = train(new_drafter(target), target, samples, tmp_path / "straight", **fields)
    steps: list[int] = []

    def killer(last: int) -> Callable[..., None]:
        def report(step: int, steps_in_all: int, tokens: int, measures: dict[str, float]) -> None:
            steps.append(step)
            if step == last:
                raise Killed

        return report

    for last in (1, 11, 17):  # before the first checkpoint, after some, and again
        with pytest.raises(Killed):
            train(new_drafter(target), target, samples, tmp_path / "killed", report=killer(last), **fields)
    kept = list((tmp_path / "killed" / "checkpoints").iterdir())
    assert len(kept) == 2 and (tmp_path / "killed" / "best" / "config.json").is_file()
    # the newest checkpoint is half written: the one before it is used
    newest = max(kept, key=lambda path: int(path.name.split("-")[1]))
    (newest / "complete.json").unlink()
    (newest / "model.safetensors").write_bytes(b"torn")
    resumed = train(new_drafter(target), target, samples, tmp_path / "killed", report=killer(-1), **fields)
    starts = [0, *(index for index in range(1, len(steps)) if steps[index] <= steps[index - 1])]
    assert (
        len(starts) == 4 and steps[starts[1]] == 1 and steps[starts[2]] > 1 and steps[starts[3]] > 1
    )  # it did resume
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
    ours, theirs = (
        load_file(tmp_path / run / "drafter" / "model.safetensors") for run in ("straight", "killed")
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_checkpoints_of_another_run_are_not_resumed(
    target: Target, make_samples: Callable[..., Samples], tmp_path: Path
) -> None:
    samples = make_samples(20)
    first_steps: list[int] = []

    def report(step: int, steps: int, tokens: int, measures: dict[str, float]) -> None:
        first_steps.append(step)
        if len(first_steps) == 7:
            raise Killed

    with pytest.raises(Killed):
        train(new_drafter(target), target, samples, tmp_path, report=report)
    assert any((tmp_path / "checkpoints").glob("checkpoint-*/complete.json"))
    train(new_drafter(target), target, samples, tmp_path, report=report, learning_rate=1e-3)
    assert first_steps[7] == 1


class AtTheEnd(TrainerCallback):
    """What the trainer holds beside the weights when it ends: the optimizer's state, the random numbers'."""

    def on_train_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        self.optimizer = copy.deepcopy(optimizer.state_dict())
        self.rng = torch.get_rng_state()


def tensors(state: Any, place: str = "") -> dict[str, torch.Tensor]:
    """Every tensor in an optimizer's state, by where it stands."""
    found = {}
    for key, value in state.items() if isinstance(state, dict) else enumerate(state):
        if isinstance(value, torch.Tensor):
            found[f"{place}/{key}"] = value
        elif isinstance(value, dict | list | tuple):
            found |= tensors(value, f"{place}/{key}")
    return found


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
def test_the_optimizer_and_the_random_numbers_resume_bit_for_bit(
    optimizer: str,
    target: Target,
    make_samples: Callable[..., Samples],
    make_llama: Callable[..., LlamaForCausalLM],
    tmp_path: Path,
) -> None:
    """With a drafter large enough for 8 bits: tensors below 4,096 numbers keep 32."""
    samples = make_samples(20)
    ends, weights = {}, {}
    for name in ("straight", "killed"):

        def report(step: int, steps: int, tokens: int, measures: dict[str, float], name: str = name) -> None:
            if name == "killed" and step == 11:
                raise Killed

        for part in (report, ignore) if name == "killed" else (ignore,):
            drafter = DraftModel(make_llama(4, hidden=64, layers=1), None)
            ends[name] = AtTheEnd()
            fields: dict[str, Any] = {"tokens": 700, "optimizer": optimizer, "report": part}
            with pytest.raises(Killed) if part is report else nullcontext():
                run_with_callback(drafter, target, samples, tmp_path / name, ends[name], **fields)
        weights[name] = drafter.model.state_dict()
    one, two = (tensors(ends[name].optimizer) for name in ("straight", "killed"))
    kinds = {value.dtype for value in one.values()}
    assert (torch.uint8 in kinds) == (optimizer == "adamw_8bit")
    assert list(one) == list(two) and all(torch.equal(one[place], two[place]) for place in one)
    assert torch.equal(ends["straight"].rng, ends["killed"].rng)
    assert all(torch.equal(value, weights["killed"][key]) for key, value in weights["straight"].items())
