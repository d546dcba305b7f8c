"""What goes wrong around a run: disks, memory, clocks, networks that hang, files that change."""

import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from data import endpoint
from data.engines import Completion
from data.errors import UserError
from data.records import open_samples, shard_fault, shard_path, signals_path
from distill import cli, hub, models, pipeline, preflight
from distill.checkpoints import newest_checkpoint
from distill.hub import within
from distill.identity import environment
from distill.preflight import check
from distill.recipe import load_recipe
from tests.data.fake_server import fake_server, good_answer
from tests.data.test_endpoint import sample as ask
from tests.data.test_records import write_two_shards
from tests.data.test_sample import ScriptedEngine, contents
from tests.data.test_sample import sample as sample_scripted

ROOT = Path(__file__).resolve().parent.parent

# ---- disk


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (OSError(28, "No space left on device"), True),
        (RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"), True),
        (ValueError("(sqlite3.OperationalError) database or disk is full"), True),
        (KeyError("x"), False),
        (OSError(2, "No such file"), False),
    ],
)
def test_a_full_disk_is_known_however_it_is_said(error: Exception, full: bool, tmp_path: Path) -> None:
    assert cli.disk_is_full(error, tmp_path / "not" / "made") is full
    try:
        raise RuntimeError("unexpected pos 64 vs 0") from error
    except RuntimeError as outer:
        assert cli.disk_is_full(outer, tmp_path) is full


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(place)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("only root may mount a small disk")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.slow
def test_a_disk_that_fills_up_ends_in_a_sentence_and_more_room_in_the_same_samples(small_disk: Path) -> None:
    words = [sys.executable, "-m", "distill.cli", "sample", "smoke", "--set", "sample.tokens=4000"]
    words += ["--set", "sample.samples_per_prompt=4"]

    def run(place: Path, *more: str) -> subprocess.CompletedProcess[str]:
        outside = {**os.environ, "DISTILL_RUNS": str(place)}
        return subprocess.run(
            [*words, *more], cwd=ROOT, env=outside, capture_output=True, text=True, check=False
        )

    foreseen = run(small_disk)
    assert foreseen.returncode == 2 and f"MISSING disk at {small_disk}" in foreseen.stderr
    unforeseen = ("--set", "estimate=null")  # then preflight knows no sizes
    full = run(small_disk, *unforeseen)
    assert full.returncode == 2 and "Traceback" not in full.stderr, full.stderr
    assert "full" in full.stderr or "No space left" in full.stderr
    subprocess.run(["mount", "-o", "remount,size=60m", str(small_disk)], check=True)
    assert run(small_disk, *unforeseen).returncode == 0
    assert run(small_disk.parent / "roomy", *unforeseen).returncode == 0
    one, two = (next(place.glob("smoke/sample-*")) for place in (small_disk, small_disk.parent / "roomy"))
    files = [json.loads((folder / "manifest.json").read_text())["files"] for folder in (one, two)]
    assert files[0] == files[1]


def test_a_folder_that_cannot_be_written_is_found_in_preflight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not check(load_recipe("smoke"), tmp_path / "runs").blocked
    monkeypatch.setattr(preflight.os, "access", lambda path, mode: False)
    (found,) = [
        item for item in check(load_recipe("smoke"), tmp_path / "runs").items if item.level == "blocks"
    ]
    assert str(tmp_path) in found.text and "DISTILL_RUNS" in found.text


# ---- memory


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 99 bytes"),
    ],
)
def test_memory_that_ends_at_load_is_said_with_the_size(
    error: Exception, tiny_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(UserError, match=r"not enough memory.*GiB.*preflight") as caught:
        models.load_model(tiny_pair[0], torch.float32)
    assert str(tiny_pair[0]) in str(caught.value)


def test_memory_that_ends_in_a_stage_names_what_to_lower() -> None:
    for stage, setting in (
        ("sample", "sample.batch_size"),
        ("train", "train.batch_size"),
        ("evaluate", "lower"),
    ):
        with pytest.raises(UserError, match=setting), pipeline._enough_memory(stage):
            raise torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(KeyError), pipeline._enough_memory("train"):
        raise KeyError("x")


# ---- files that change


def flip(path: Path, place: int | None = None) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2 if place is None else place] ^= 0x10
    path.write_bytes(bytes(raw))


def counts(path: Path, place: int) -> bool:
    """Is a flip at `place` noticed? The file stays as it was."""
    flip(path, place)
    fault = shard_fault(path)
    flip(path, place)
    return bool(fault)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def test_every_flipped_bit_of_a_shards_records_is_found_or_changes_nothing(tmp_path: Path) -> None:
    write_two_shards(tmp_path)
    path = shard_path(tmp_path, 0)
    whole, records = path.read_bytes(), open_samples(tmp_path).records
    assert shard_fault(path) == ""
    found = 0
    for place in range(4, len(whole), max(1, len(whole) // 60)):
        flip(path, place)
        fault = shard_fault(path)
        found += bool(fault)
        if not fault:
            assert open_samples(tmp_path).records == records, f"byte {place} lies unnoticed"
        path.write_bytes(whole)
    assert found > 10


@pytest.mark.parametrize("harm", [flip, cut, Path.unlink])
@pytest.mark.parametrize("what", ["records", "signals"])
def test_a_damaged_shard_of_an_unfinished_sampling_is_named_and_made_again(
    what: str, harm, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sample_scripted(tmp_path / "straight", ScriptedEngine())
    sample_scripted(tmp_path / "harmed", ScriptedEngine())
    path = shard_path(tmp_path / "harmed", 1)
    harm(path if what == "records" else signals_path(path))
    if harm is flip and not shard_fault(path):  # it hit a byte that nobody reads: take one that counts
        flip(path)
        flip(path, next(place for place in range(4, 2000) if counts(path, place)))
    engine = ScriptedEngine()
    with caplog.at_level(logging.WARNING):
        sample_scripted(tmp_path / "harmed", engine)
    assert contents(tmp_path / "harmed") == contents(tmp_path / "straight")
    assert engine.asked, "nothing was made again"
    assert "shard 1 is damaged" in caplog.text or (what, harm) == ("records", Path.unlink)


@pytest.mark.parametrize("harm", [flip, cut, Path.unlink])
def test_a_damaged_checkpoint_is_named_and_an_earlier_one_used(
    harm, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from data.files import sha256_file

    for step in (5, 10):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(bytes(range(200)))
        files = {"model.safetensors": sha256_file(folder / "model.safetensors")}
        (folder / "complete.json").write_text(json.dumps({"identity": "me", "files": files}))
    assert newest_checkpoint(tmp_path, "me") == tmp_path / "checkpoint-10"
    harm(tmp_path / "checkpoint-10" / "model.safetensors")
    assert newest_checkpoint(tmp_path, "me") == tmp_path / "checkpoint-5"
    assert "checkpoint-10 is damaged (model.safetensors)" in caplog.text
    (tmp_path / "checkpoint-5" / "complete.json").write_text('{"identity": "me", "fil')
    assert newest_checkpoint(tmp_path, "me") is None


# ---- networks that hang


def test_a_hub_that_hangs_does_not_hold_preflight(monkeypatch: pytest.MonkeyPatch) -> None:
    assert within(5, lambda: 7) == 7
    with pytest.raises(KeyError):
        within(5, lambda: {}["x"])
    never = threading.Event()
    with pytest.raises(TimeoutError, match="no answer"):
        within(0.05, never.wait)
    monkeypatch.setattr(hub, "HUB_SECONDS", 0.05)
    monkeypatch.setattr(hub.Hub, "_ask", lambda *_: never.wait())
    found = [
        item.text for item in check(load_recipe("llama-1b"), Path("runs")).items if item.what == "target"
    ]
    assert "cannot be reached (TimeoutError)" in found[0]
    never.set()


def test_a_server_that_takes_the_call_and_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "REACH_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        with pytest.raises(UserError, match="no server answers"):
            endpoint.check_reachable(f"http://127.0.0.1:{deaf.getsockname()[1]}/v1")


def test_an_answer_without_end_fails_that_sample_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "MOST_BYTES", 2000)
    monkeypatch.setattr(endpoint, "FIRST_WAIT", 0.001)

    def behave(body: dict, times: int) -> tuple[int, object]:
        answer = good_answer(body)
        return 200, {**answer, "padding": "x" * 5000} if body["seed"] % 2 else answer

    with fake_server(behave) as fake:  # type: ignore[arg-type]
        results, _ = ask(fake.url, count=4)
    assert [isinstance(result, Completion) for result in results] == [True, False, True, False]


# ---- clocks, environment


def test_a_clock_that_jumps_back_changes_no_time_that_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from distill.stages import Stage, run_stage

    def work(folder: Path) -> None:
        monkeypatch.setattr(time, "time", lambda: 0.0)
        (folder / "out").write_text("x")

    stage = Stage("sample", tmp_path, {}, {})
    assert 0 <= run_stage(stage, work, fresh=False, say=lambda text: None).seconds < 60
    assert run_stage(stage, work, fresh=False, say=lambda text: None).skipped


def test_the_environment_stands_beside_every_manifest_and_in_no_digest(tmp_path: Path) -> None:
    from distill.stages import Stage, run_stage

    stage = Stage("sample", tmp_path, {}, {})
    run_stage(
        stage, lambda folder: (folder / "out").write_text("x") and None, fresh=False, say=lambda text: None
    )
    manifest = stage.manifest()
    assert manifest is not None
    kept = {
        "cpu",
        "cores",
        "gpu",
        "threads",
        "python",
        "torch",
        "transformers",
        "commit",
        "uncommitted_changes",
    }
    assert kept <= set(manifest["environment"]) and set(environment()) >= kept
    assert "environment" not in json.dumps(stage.inputs())
