"""Shards of earlier samplings: taken over where they hold what is planned, sampled where they do not."""

import errno
from collections.abc import Sequence
from pathlib import Path

import pytest

from data.records import open_samples, shard_path
from data.sample import SampleConfig, kept_tokens, plan
from data.sample_summary import quarantine_path
from data.take_over import take_over
from tests.data.test_sample import CONFIG, ScriptedEngine, contents, prompts, sample


def taken(
    directory: Path, elsewhere: Sequence[Path], config: SampleConfig = CONFIG, held_out: int = 5
) -> int:
    return take_over(plan(prompts(), config, held_out=held_out, seed=1), elsewhere, directory)


def test_quarantine_goes_along_when_a_shard_is_taken_over(tmp_path: Path) -> None:
    sample(tmp_path / "one", ScriptedEngine(fails=lambda request: request.prompt[0] % 10 == 3))
    none = ScriptedEngine()
    sample(tmp_path / "two", none, elsewhere=[tmp_path / "one"])
    assert not none.asked
    summaries = [(tmp_path / name / "samples.json").read_text() for name in ("one", "two")]
    assert summaries[0] == summaries[1]
    assert quarantine_path(shard_path(tmp_path / "two", 0)).exists()


def test_a_larger_budget_samples_the_rest_alone(tmp_path: Path) -> None:
    sample(tmp_path / "small", ScriptedEngine())
    more = CONFIG.model_copy(update={"tokens": 900})
    sample(tmp_path / "straight", ScriptedEngine(), more)
    engine = ScriptedEngine()
    sample(tmp_path / "large", engine, more, [tmp_path / "small"])
    assert contents(tmp_path / "large") == contents(tmp_path / "straight")
    assert len(engine.asked) == len(open_samples(tmp_path / "large")) - len(open_samples(tmp_path / "small"))


def test_other_held_out_counts_keep_the_training_shards(tmp_path: Path) -> None:
    sample(tmp_path / "five", ScriptedEngine())
    sample(tmp_path / "straight", ScriptedEngine(), held_out=7)
    engine = ScriptedEngine()
    sample(tmp_path / "seven", engine, elsewhere=[tmp_path / "five"], held_out=7)
    assert contents(tmp_path / "seven") == contents(tmp_path / "straight")
    held_out = len(open_samples(tmp_path / "seven")) - len(
        open_samples(tmp_path / "seven").where(split="train")
    )
    assert len(engine.asked) == held_out == 7 + 2 * 7 + 2 * 7


def test_other_samples_are_not_taken_over(tmp_path: Path) -> None:
    sample(tmp_path / "two", ScriptedEngine())
    hotter = CONFIG.model_copy(update={"temperature": [0.0, 2.0]})
    select, *_ = plan(prompts(), hotter, held_out=5, seed=1)
    assert {planned.temperature for planned in select} == {0.0, 2.0}
    assert taken(tmp_path / "hotter", [tmp_path / "two"], hotter) == 0
    assert taken(tmp_path / "fewer", [tmp_path / "two"], held_out=4) > 0  # those of the training split
    assert not shard_path(tmp_path / "fewer", 0).exists()


def test_what_is_there_stays_and_what_is_damaged_is_left(tmp_path: Path) -> None:
    sample(tmp_path / "one", ScriptedEngine())
    whole = taken(tmp_path / "two", [tmp_path / "one"])
    assert whole > 1 and taken(tmp_path / "two", [tmp_path / "one"]) == 0
    shard = shard_path(tmp_path / "one", 0)
    shard.write_bytes(shard.read_bytes()[:-9])
    assert taken(tmp_path / "three", [tmp_path / "one"]) == whole - 1


def test_what_cannot_be_linked_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample(tmp_path / "one", ScriptedEngine())

    def another_disk(self: Path, target: Path) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(Path, "hardlink_to", another_disk)
    none = ScriptedEngine()
    sample(tmp_path / "two", none, elsewhere=[tmp_path / "one"])
    assert not none.asked and contents(tmp_path / "two") == contents(tmp_path / "one")
    assert not list((tmp_path / "two").glob("*.tmp"))


def test_a_shard_that_is_a_symbolic_link_is_taken_over_as_a_file(tmp_path: Path) -> None:
    sample(tmp_path / "one", ScriptedEngine())
    shard = shard_path(tmp_path / "one", 0)
    shard.rename(tmp_path / "elsewhere.parquet")
    shard.symlink_to("../elsewhere.parquet")
    assert taken(tmp_path / "two", [tmp_path / "one"]) > 1
    mine = shard_path(tmp_path / "two", 0)
    assert not mine.is_symlink() and mine.read_bytes() == shard.read_bytes()


def test_kept_tokens_are_those_of_the_training_split(tmp_path: Path) -> None:
    total = sample(tmp_path, ScriptedEngine())
    assert kept_tokens(tmp_path) == total < sum(record.completion_tokens for record in open_samples(tmp_path))


@pytest.mark.parametrize("content", ["{", '{"reason": "none"}\n', "[1]\n"])
def test_a_damaged_quarantine_lends_nothing_of_its_shard(tmp_path: Path, content: str) -> None:
    sample(tmp_path / "one", ScriptedEngine())
    whole = taken(tmp_path / "two", [tmp_path / "one"])
    quarantine_path(shard_path(tmp_path / "one", 0)).write_text(content)
    assert taken(tmp_path / "three", [tmp_path / "one"]) == whole - 1
