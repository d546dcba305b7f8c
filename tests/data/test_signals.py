"""Signals on disk: both kinds come back bit for bit, and a changed file is refused when it is used."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from data.errors import UserError
from data.records import SampleRecord, open_samples, write_shard
from data.signals import Signals, TopK, concatenate, read_signals, rows, write_signals


def signals(count: int, dtype: torch.dtype = torch.float32) -> Signals:
    return Signals(torch.randn(count, 4).to(dtype), torch.randn(count), torch.arange(count))


def top_k(count: int) -> TopK:
    return TopK(torch.randint(0, 90, (count, 3), dtype=torch.int32), -torch.rand(count, 3), torch.rand(count))


def record(number: int) -> SampleRecord:
    return SampleRecord(
        f"p{number}", "t", "t", "train", True, 0, 0.0, 0, [1, 2, 3], [False, True, True], "stop"
    )


@pytest.mark.parametrize("make", [signals, top_k, lambda count: signals(count, torch.bfloat16)])
def test_what_is_written_is_read(make: object, tmp_path: Path) -> None:
    parts = [make(2), make(3)]  # type: ignore[operator]
    write_signals(tmp_path / "s.safetensors", parts)
    found = read_signals(tmp_path / "s.safetensors")
    assert type(found) is type(parts[0]) and len(found) == 5
    for name, tensor in concatenate(parts).tensors().items():
        assert torch.equal(found.tensors()[name], tensor)
        assert torch.equal(rows(found, slice(2, 5)).tensors()[name], parts[1].tensors()[name])


def test_a_changed_file_is_refused_when_its_first_row_is_used(tmp_path: Path) -> None:
    for index in (0, 1):
        write_shard(tmp_path, index, [record(index)], [signals(2)])
    path = tmp_path / "signals-00001.safetensors"
    changed = load_file(path)
    changed["hidden"][1, 2] += 1  # one number; sizes and header stay
    save_file(changed, path)
    samples = open_samples(tmp_path)
    assert len(samples.signals(0)) == 2
    with pytest.raises(UserError, match=r"signals-00001.*has changed since it was written"):
        samples.where(split="train").signals(1)


def test_shards_of_earlier_versions_carry_no_checksum(tmp_path: Path) -> None:
    write_shard(tmp_path, 0, [record(0)], None)
    write_signals(tmp_path / "signals-00000.safetensors", [signals(2)])
    assert len(open_samples(tmp_path).signals(0)) == 2
