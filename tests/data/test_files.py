"""Files are written whole or not at all, and equal content gets equal digests."""

import hashlib
import os
from pathlib import Path

import pytest

from data import files
from data.files import (
    canonical_hash,
    drop_abandoned,
    replace_directory,
    sha256_file,
    write_atomic,
    write_json,
)


def test_the_digest_is_that_of_the_bytes(tmp_path: Path) -> None:
    content = os.urandom(3 * (1 << 20) + 17)  # more than one block
    (tmp_path / "big").write_bytes(content)
    assert sha256_file(tmp_path / "big") == hashlib.sha256(content).hexdigest()


def test_text_is_written_as_utf8_without_changing_newlines(tmp_path: Path) -> None:
    write_atomic(tmp_path / "new" / "folder" / "a.txt", "caf\u00e9\r\n\n")
    assert (tmp_path / "new" / "folder" / "a.txt").read_bytes() == b"caf\xc3\xa9\r\n\n"


def test_a_file_is_as_readable_as_one_that_is_written_plainly(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("x")
    write_atomic(tmp_path / "atomic", "x")
    assert (tmp_path / "atomic").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_failure_before_the_rename_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_atomic(tmp_path / "a", "old")

    def fail(handle: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(files.os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomic(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_the_content_is_synced_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen_at_sync = []
    real = os.fsync

    def watch(handle: int) -> None:
        seen_at_sync.append((tmp_path / "a").exists())
        real(handle)

    monkeypatch.setattr(files.os, "fsync", watch)
    write_atomic(tmp_path / "a", "x")
    assert seen_at_sync[0] is False


def test_json_is_sorted_indented_and_strict(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"b": 1, "a": [True]})
    assert (tmp_path / "a.json").read_text() == '{\n  "a": [\n    true\n  ],\n  "b": 1\n}\n'
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "b.json", {"loss": float("nan")})
    assert not (tmp_path / "b.json").exists()


def test_the_canonical_hash_ignores_the_order_of_keys_and_nothing_else() -> None:
    assert canonical_hash({"a": 1, "b": 2}) == canonical_hash({"b": 2, "a": 1})
    assert canonical_hash([1, 2]) != canonical_hash([2, 1])
    assert canonical_hash({"a": 1}) != canonical_hash({"a": "1"})
    # A pinned value: a change would rename the outputs of every stage.
    assert (
        canonical_hash({"a": [1, "x", None, 0.5]})
        == hashlib.sha256(b'{"a":[1,"x",null,0.5]}').hexdigest()[:16]
    )


@pytest.mark.parametrize("odd", [{1: "a"}, {"x": [{None: 1}]}])
def test_keys_that_json_would_confuse_are_refused(odd: object) -> None:
    with pytest.raises(TypeError, match="string keys"):
        canonical_hash(odd)


def test_a_committed_file_takes_the_place_of_the_old_one_and_leaves_no_temporary(tmp_path: Path) -> None:
    from data.files import commit_file

    temporary, path = tmp_path / "a.tmp", tmp_path / "a"
    path.write_text("old")
    temporary.write_text("new")
    commit_file(temporary, path)
    assert path.read_text() == "new" and not temporary.exists()


def test_what_a_killed_process_had_begun_is_swept_but_nothing_that_is_being_written(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        (folder / "weights").write_text("half")
        drop_abandoned(tmp_path)  # another process starts
        assert (folder / "weights").exists()

    replace_directory(tmp_path / "model", fill)
    child = os.fork()
    if not child:
        replace_directory(tmp_path / "other", lambda folder: os._exit(9))
    os.waitpid(child, 0)
    (left,) = tmp_path.glob(".other.*.tmp")
    drop_abandoned(tmp_path)
    assert not left.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    drop_abandoned(tmp_path / "nowhere")
