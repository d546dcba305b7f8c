from pathlib import Path

import pytest
import torch

from data.errors import UserError
from data.records import SampleRecord, collate, open_samples, read_records, shard_path, write_shard
from data.signals import Signals


def record(ids: list[int], prompt_length: int, **changes: object) -> SampleRecord:
    mask = [i >= prompt_length for i in range(len(ids))]
    values = {
        "prompt_id": "p", "task": "json", "template": "t", "split": "train", "seen_template": True,
        "sample_index": 0, "temperature": 0.0, "seed": 1, "input_ids": ids, "completion_mask": mask,
        "finish_reason": "stop",
    }  # fmt: skip
    return SampleRecord(**{**values, **changes})


def signals(count: int, value: float) -> Signals:
    return Signals(
        torch.full((count, 4), value), torch.full((count,), value), torch.full((count,), int(value))
    )


def write_two_shards(directory: Path) -> None:
    write_shard(
        directory,
        0,
        [record([5, 6, 7, 2], 2), record([5, 2], 1, split="test")],
        [signals(2, 1), signals(1, 2)],
    )
    write_shard(directory, 1, [record([8, 9, 10, 11, 2], 1, temperature=1.0)], [signals(4, 3)])


def test_shards_read_back_with_each_record_at_its_own_signals(tmp_path: Path) -> None:
    write_two_shards(tmp_path)
    samples = open_samples(tmp_path)
    assert [r.input_ids for r in samples] == [[5, 6, 7, 2], [5, 2], [8, 9, 10, 11, 2]]
    assert [float(samples.signals(i).hidden[0, 0]) for i in range(3)] == [1, 2, 3]
    assert [len(samples.signals(i)) for i in range(3)] == [2, 1, 4]
    kept = samples.where(temperature=1.0)
    assert len(kept) == 1 and float(kept.signals(0).hidden[0, 0]) == 3
    assert len(samples.where(split="test")) == 1


def test_a_batch_masks_padding_also_where_the_pad_id_is_eos(tmp_path: Path) -> None:
    write_two_shards(tmp_path)
    samples = open_samples(tmp_path)
    batch = collate(samples, [2, 1], pad_id=2)
    assert batch.input_ids.tolist() == [[8, 9, 10, 11, 2], [5, 2, 2, 2, 2]]
    assert batch.attention_mask.tolist() == [[1] * 5, [1, 1, 0, 0, 0]]
    # The first answer token and the real EOS are trained; padding EOS is not.
    assert batch.completion_mask.tolist() == [
        [False, True, True, True, True],
        [False, True, False, False, False],
    ]
    assert batch.signals is not None
    assert batch.signals.hidden[:, 0].tolist() == [3, 3, 3, 3, 2]


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    write_two_shards(tmp_path)
    path = shard_path(tmp_path, 1)
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(UserError, match="samples-00001"):
        open_samples(tmp_path)


def test_signals_that_do_not_fit_their_shard_are_an_error(tmp_path: Path) -> None:
    write_shard(tmp_path, 0, [record([5, 6, 7, 2], 2)], [signals(3, 1)])
    with pytest.raises(UserError, match="3 rows"):
        open_samples(tmp_path)


def test_states_are_exact_in_the_dtype_of_the_target_alone(tmp_path: Path) -> None:
    kept = signals(2, 1)
    kept.hidden = kept.hidden.half()
    write_shard(tmp_path, 0, [record([5, 6, 7, 2], 2)], [kept])
    samples = open_samples(tmp_path)
    assert samples.has_signals and samples.has_exact_signals(torch.float16)
    assert not samples.has_exact_signals(torch.float32)
    write_shard(tmp_path, 0, [record([5, 6, 7, 2], 2)], None)
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    assert not open_samples(tmp_path).has_exact_signals(torch.float32)


@pytest.mark.parametrize(("ids", "prompt"), [([1, 2], 2), ([1, 2], 0)])
def test_a_record_needs_a_prompt_and_a_completion(ids: list[int], prompt: int) -> None:
    with pytest.raises(UserError):
        record(ids, prompt)
    assert record([1, 2], 1).completion_tokens == 1


def test_no_samples_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no samples"):
        open_samples(tmp_path)
    with pytest.raises(UserError):
        read_records(tmp_path / "samples-00000.parquet")
