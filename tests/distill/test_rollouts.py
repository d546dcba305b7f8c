"""On-policy batches: the drafter's own text, the same on every run, judged by the target."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from data.records import Samples, collate
from distill.models import Target
from distill.prune import prune
from distill.rollouts import Rollouts
from distill.train import OnPolicyConfig, TrainConfig, train_drafter
from evaluation.decoder.drafters import DraftModel
from tests.distill.conftest import EOS

VOCAB = torch.cat((torch.tensor([2]), torch.arange(3, 96, 2)))


def new_drafter(target: Target) -> DraftModel:
    return DraftModel(prune(target.model, [0, 3], target.model.lm_head.weight[VOCAB]), VOCAB)


def rollouts(target: Target, temperature: float = 1.0, **config: float) -> Rollouts:
    policy = OnPolicyConfig(**{"share": 0.5, **config})
    return Rollouts(new_drafter(target), target, policy, temperature, 3, 1000)


def batch_of(samples: Samples, rows: list[int], pad_id: int) -> dict[str, torch.Tensor]:
    batch = collate(samples, rows, pad_id)
    return {
        "input_ids": batch.input_ids,
        "attention_mask": batch.attention_mask,
        "completion_mask": batch.completion_mask,
    }


def test_late_batches_are_replaced_by_their_number(target: Target) -> None:
    late = rollouts(target, share=0.25, start=0.4)
    wanted = [late.wants(number) for number in range(1000)]
    assert not any(wanted[:400]) and 110 < sum(wanted[400:]) < 190
    assert wanted == [late.wants(number) for number in range(1000)]
    assert all(rollouts(target, share=1.0, start=0.0).wants(number) for number in range(5))


def test_a_rollout_is_the_drafters_own_text(target: Target, make_samples: Callable[..., Samples]) -> None:
    """Nearly cold, against an argmax loop without a cache, over prompts of several lengths."""
    own = rollouts(target, temperature=1e-4)
    own.drafter.model.__dict__["forward"] = pytest.fail  # the trainer's, which is not called
    inputs = batch_of(make_samples(6), [0, 1, 2, 3], target.pad_id)
    made = own.batch(inputs, 7)
    assert "forward" in own.drafter.model.__dict__
    del own.drafter.model.__dict__["forward"]
    for row in range(4):
        start = int(inputs["completion_mask"][row].int().argmax())
        limit = int(inputs["completion_mask"][row].sum())
        ids = inputs["input_ids"][row, :start].tolist()
        while len(ids) < start + limit and EOS not in ids[start:]:
            logits = own.drafter.model(torch.tensor([ids])).logits[0, -1]
            ids.append(int(VOCAB[logits.argmax()]))
        length = int(made["attention_mask"][row].sum())
        assert made["input_ids"][row, :length].tolist() == ids
        expected = [False] * start + [True] * (len(ids) - start)
        assert made["completion_mask"][row, :length].tolist() == expected
        assert not made["completion_mask"][row, length:].any()


def test_draws_belong_to_the_batchs_number(target: Target, make_samples: Callable[..., Samples]) -> None:
    own, inputs = rollouts(target, temperature=2.0), batch_of(make_samples(6), [0, 1, 2], target.pad_id)
    one, again, other = (own.batch(inputs, number)["input_ids"].tolist() for number in (1, 1, 2))
    assert one == again != other
    told = own.batch(inputs, 1)
    assert set(told) == {"input_ids", "attention_mask", "completion_mask"}  # no stale signals
    assert torch.isin(told["input_ids"][told["completion_mask"]], VOCAB).all()


def test_a_part_of_a_batch_is_drawn_as_the_whole(
    target: Target, make_samples: Callable[..., Samples]
) -> None:
    """What several processes draw is what one would."""
    own, samples = rollouts(target, temperature=2.0), make_samples(8)
    whole = texts(own.batch(batch_of(samples, [0, 1, 2, 3, 4], target.pad_id), 5))
    even = texts(own.batch(batch_of(samples, [0, 2, 4], target.pad_id), 5, slice(0, None, 2)))
    odd = texts(own.batch(batch_of(samples, [1, 3], target.pad_id), 5, slice(1, None, 2)))
    assert (even, odd) == (whole[::2], whole[1::2])
    assert texts(own.batch(batch_of(samples, [1, 3], target.pad_id), 5)) != odd


def texts(made: dict[str, torch.Tensor]) -> list[list[int]]:
    return [
        ids[seen.bool()].tolist() for ids, seen in zip(made["input_ids"], made["attention_mask"], strict=True)
    ]


def test_rows_of_their_own_are_not_packed() -> None:
    with pytest.raises(ValidationError, match="leave packing out"):
        TrainConfig.model_validate({"tokens": 1, "packing": True, "on_policy": {"share": 0.5}})


def test_an_end_of_sequence_ends_a_rollout(target: Target, make_samples: Callable[..., Samples]) -> None:
    own = rollouts(target)
    with torch.no_grad():  # every id is as likely as another, so some of 16 answers hold an EOS
        own.drafter.model.lm_head.weight.zero_()
    made = own.batch(batch_of(make_samples(30), list(range(16)), target.pad_id), 0)
    answers = [
        ids[mask].tolist() for ids, mask in zip(made["input_ids"], made["completion_mask"], strict=True)
    ]
    assert any(EOS in answer for answer in answers)
    assert all(EOS not in answer[:-1] for answer in answers)


class Killed(Exception):
    pass


def test_a_killed_run_rolls_out_the_same_again(
    target: Target, make_samples: Callable[..., Samples], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = make_samples(20)
    config = TrainConfig(
        tokens=300, learning_rate=3e-3, batch_size=4, on_policy=OnPolicyConfig(share=0.6, start=0.3)
    )
    replaced: list[int] = []
    original = Rollouts.batch

    def counted(self: Rollouts, inputs: dict[str, Any], number: int, part: slice) -> dict[str, Any]:
        replaced.append(number)
        return original(self, inputs, number, part)

    monkeypatch.setattr(Rollouts, "batch", counted)

    steps: list[int] = []

    def train(out_dir: Path, last: int | None = None) -> dict[str, torch.Tensor]:
        drafter = new_drafter(target)

        def report(step: int, *_: Any) -> None:
            steps.append(step)
            if step == last:
                raise Killed

        train_drafter(
            drafter, target, samples, config, temperature=1.0, seed=0, out_dir=out_dir, report=report
        )
        return drafter.model.state_dict()

    straight = train(tmp_path / "straight")
    numbers = list(replaced)
    assert numbers and min(numbers) >= 0.3 * steps[-1] and len(numbers) < 0.7 * steps[-1]
    with pytest.raises(Killed):
        train(tmp_path / "killed", max(numbers))
    resumed = train(tmp_path / "killed")
    assert all(torch.equal(value, straight[name]) for name, value in resumed.items())
