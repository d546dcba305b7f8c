"""Stages: what is committed is skipped, what is half done is resumed, what is damaged is made again."""

import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from data.errors import UserError
from distill.stages import MANIFEST, SCRATCH, Outcome, Stage, recipe_lock, run_stage


class Work:
    """Writes two files, the second only when it is let; counts its calls."""

    def __init__(self, text: str = "two") -> None:
        self.calls = 0
        self.stop = False
        self.text = text

    def __call__(self, folder: Path) -> None:
        self.calls += 1
        if not (folder / "one.txt").exists():
            (folder / "one.txt").write_text("one")
        if self.stop:
            raise KeyboardInterrupt
        (folder / "deep").mkdir(exist_ok=True)
        (folder / "deep" / "two.txt").write_text(self.text)


def make(root: Path, name: str = "sample", upstream: tuple[Stage, ...] = (), **config: object) -> Stage:
    return Stage(name, root, config, {"prompts": "digest"}, upstream)


def run(stage: Stage, work: Callable[[Path], None], fresh: bool = False) -> tuple[Outcome, list[str]]:
    said: list[str] = []
    return run_stage(stage, work, fresh=fresh, say=said.append), said


def test_key_depends_on_everything_that_decides_the_outputs(tmp_path: Path) -> None:
    base = make(tmp_path, tokens=1)
    others = [
        make(tmp_path, tokens=2),
        make(tmp_path, name="train", tokens=1),
        Stage("sample", tmp_path, {"tokens": 1}, {"prompts": "another"}),
        make(tmp_path, upstream=(make(tmp_path, tokens=3),), tokens=1),
    ]
    keys = {stage.key for stage in [base, *others]}
    assert len(keys) == 5
    assert make(tmp_path / "elsewhere", tokens=1).key == base.key
    downstream = [make(tmp_path, name="train", upstream=(stage,)).key for stage in (base, others[0])]
    assert downstream[0] != downstream[1]


def test_committed_stage_is_skipped(tmp_path: Path) -> None:
    stage, work = make(tmp_path), Work()
    first, _ = run(stage, work)
    again, said = run(stage, work)
    assert (first.skipped, first.resumed, again.skipped, work.calls) == (False, False, True, 1)
    assert again.seconds == first.seconds and said == []
    manifest = json.loads((stage.directory / MANIFEST).read_text())
    assert set(manifest["files"]) == {"one.txt", "deep/two.txt"}


def test_interrupted_stage_is_resumed_in_its_folder(tmp_path: Path) -> None:
    stage, work = make(tmp_path), Work()
    work.stop = True
    with pytest.raises(KeyboardInterrupt):
        run(stage, work)
    assert stage.manifest() is None
    written = (stage.directory / "one.txt").stat().st_mtime_ns
    work.stop = False
    outcome, _ = run(stage, work)
    assert outcome.resumed and stage.manifest() is not None
    assert (stage.directory / "one.txt").stat().st_mtime_ns == written


@pytest.mark.parametrize("harm", ["flip", "truncate", "delete"])
def test_damage_is_named_and_only_that_part_made_again(tmp_path: Path, harm: str) -> None:
    stage, work = make(tmp_path), Work()
    run(stage, work)
    two = stage.directory / "deep" / "two.txt"
    before = (stage.directory / "one.txt").stat().st_mtime_ns
    if harm == "delete":
        two.unlink()
    else:
        two.write_text("twO" if harm == "flip" else "tw")
    outcome, said = run(stage, work)
    assert not outcome.skipped and "deep/two.txt" in said[0]
    assert two.read_text() == "two" and stage.damage() == []
    assert (stage.directory / "one.txt").stat().st_mtime_ns == before


def test_a_damaged_shard_goes_with_all_its_files(tmp_path: Path) -> None:
    def work(folder: Path) -> None:
        for number in ("00000", "00001"):
            if not (folder / f"samples-{number}.parquet").exists():
                (folder / f"signals-{number}.safetensors").write_text(number)
                (folder / f"samples-{number}.parquet").write_text(number)

    stage = make(tmp_path)
    run(stage, work)
    untouched = (stage.directory / "samples-00000.parquet").stat().st_mtime_ns
    (stage.directory / "signals-00001.safetensors").unlink()
    run(stage, work)
    assert stage.damage() == [] and (stage.directory / "signals-00001.safetensors").exists()
    assert (stage.directory / "samples-00000.parquet").stat().st_mtime_ns == untouched


@pytest.mark.parametrize("text", ["", '{"files": ', "[]", '{"key": "0", "files": {}}', "\x00" * 40])
def test_unreadable_manifest_is_no_commit_mark(tmp_path: Path, text: str) -> None:
    stage, work = make(tmp_path), Work()
    run(stage, work)
    (stage.directory / MANIFEST).write_text(text)
    outcome, said = run(stage, work)
    assert not outcome.skipped and work.calls == 2 and MANIFEST in said[0]
    assert run(stage, work)[0].skipped


def test_siblings_differ_in_the_places_named_alone_and_are_finished(tmp_path: Path) -> None:
    def stage(tokens: int, temperature: float = 0.0, recipe: str = "one") -> Stage:
        return make(tmp_path / recipe, sample={"tokens": tokens, "temperature": temperature})

    place = [("config", "sample", "tokens")]
    hotter = [*place, ("config", "sample", "temperature")]
    run(stage(1), Work())
    run(stage(1, temperature=1.0), Work())
    assert stage(2).siblings(place) == [stage(1).directory]
    assert stage(1).siblings(place) == []  # itself is none
    assert stage(1, recipe="other").siblings(place) == [stage(1).directory]
    assert stage(1).siblings(hotter) == [stage(1, temperature=1.0).directory]
    stopped = Work()
    stopped.stop = True
    with pytest.raises(KeyboardInterrupt):
        run(stage(3), stopped)
    assert stage(2).siblings(place) == [stage(1).directory]  # an unfinished one is none


def test_fresh_sets_the_old_outputs_aside(tmp_path: Path) -> None:
    stage = make(tmp_path)
    run(stage, Work("old!"))
    outcome, said = run(stage, Work("new!"), fresh=True)
    assert not outcome.skipped and not outcome.resumed and "--fresh" in said[0]
    assert (stage.directory / "deep" / "two.txt").read_text() == "new!"
    aside = stage.directory.with_name(f"{stage.directory.name}.old-1")
    assert (aside / "deep" / "two.txt").read_text() == "old!"


def test_stage_made_from_other_contents_is_not_reused(tmp_path: Path) -> None:
    sample, work = make(tmp_path), Work()
    train = make(tmp_path, name="train", upstream=(sample,))
    run(sample, Work("old!"))
    run(train, work)
    run(sample, Work("new!"), fresh=True)
    outcome, said = run(train, work)
    assert not outcome.skipped and not outcome.resumed and work.calls == 2
    assert "other outputs" in said[0]


@pytest.mark.parametrize(
    "harm",
    [
        {"files": None},
        {"files": ["out.txt"]},
        {"files": {"out.txt": 3}},
        {"files": {"out.txt": {"bytes": "4", "sha256": ""}}},
        {"files": {"out.txt": {"bytes": 4}}},
        {"files": {"../victim": {"bytes": 4, "sha256": ""}}},
        {"files": {"/victim": {"bytes": 4, "sha256": ""}}},
        {"seconds": "long"},
        {"key": "other"},
    ],
    ids=str,
)
def test_a_manifest_of_another_form_is_none_and_reaches_no_file_outside(
    tmp_path: Path, harm: dict[str, object]
) -> None:
    stage, work = make(tmp_path), Work()
    run(stage, work)
    victim = stage.directory.parent / "victim"
    victim.write_text("kept")
    path = stage.directory / MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), **harm}))
    outcome, said = run(stage, work)
    assert work.calls == 2 and not outcome.skipped and "cannot be read" in said[0]
    assert victim.read_text() == "kept"


def test_a_manifest_nested_too_deep_is_none(tmp_path: Path) -> None:
    stage, work = make(tmp_path), Work()
    run(stage, work)
    (stage.directory / MANIFEST).write_text("[" * 100_000)
    run(stage, work)
    assert work.calls == 2


def test_scratch_and_temporary_files_are_not_outputs(tmp_path: Path) -> None:
    def work(folder: Path) -> None:
        (folder / SCRATCH).mkdir()
        (folder / SCRATCH / "step-1").write_text("state")
        (folder / ".shard.tmp").write_text("half")
        (folder / "out.txt").write_text("out")

    stage = make(tmp_path)
    run(stage, work)
    manifest = stage.manifest()
    assert manifest is not None and set(manifest["files"]) == {"out.txt"}
    assert not (stage.directory / SCRATCH).exists()


def test_second_run_of_a_recipe_is_refused_by_name(tmp_path: Path) -> None:
    with recipe_lock(tmp_path), pytest.raises(UserError, match=str(os.getpid())), recipe_lock(tmp_path):
        pass
    with recipe_lock(tmp_path):  # free again
        pass


def _hold(root: Path, ready: "multiprocessing.synchronize.Event") -> None:
    with recipe_lock(root):
        ready.set()
        signal.pause()


def test_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    holder = context.Process(target=_hold, args=(tmp_path, ready))
    holder.start()
    assert ready.wait(30)
    with pytest.raises(UserError, match=str(holder.pid)), recipe_lock(tmp_path):
        pass
    holder.kill()
    holder.join()
    with recipe_lock(tmp_path) as killed:
        assert killed
    with recipe_lock(tmp_path) as killed:
        assert not killed
    with pytest.raises(OSError, match="full"), recipe_lock(tmp_path):
        raise OSError("full")
    with recipe_lock(tmp_path) as killed:
        assert killed, "it failed, and may have left runs open in MLflow"
