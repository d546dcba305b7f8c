"""Each server's own check, replayed: what it refuses is named, what it takes passes."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distill.export.pair import (
    GgufVocabulary,
    Side,
    check_pair,
    llama_cpp_checks,
    read_side,
    refused_by,
    tensor_parallel_sizes,
    vocabulary_hash,
)
from distill.tiny import make_tiny_pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_tiny_pair(tmp_path_factory.mktemp("pair"), seed=5)


@pytest.fixture
def draft(pair: tuple[Path, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(pair[1], tmp_path / "draft"))


def edit(directory: Path, name: str, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads((directory / name).read_text())
    change(content)
    (directory / name).write_text(json.dumps(content))


def broken(target: Path, draft: Path, name: Path | None = None) -> set[str]:
    return {check.rule for check in check_pair(target, draft, name) if not check.ok}


def test_a_pair_of_one_family_passes_every_check(pair: tuple[Path, Path]) -> None:
    checks = check_pair(*pair)
    assert len(checks) == 9 and all(check.ok for check in checks)
    assert refused_by(checks) == {}


def test_another_vocabulary_size_is_refused_by_those_that_compare_it(
    pair: tuple[Path, Path], draft: Path
) -> None:
    edit(draft, "config.json", lambda config: config.update(vocab_size=400))
    refused = refused_by(check_pair(pair[0], draft))
    assert {"vllm", "sglang", "transformers"} <= set(refused)
    assert "llama.cpp" not in refused  # it takes 128 ids of difference, and reads the GGUF anyway
    assert "384" in refused["vllm"] and "400" in refused["vllm"]


def test_one_swapped_text_is_found(pair: tuple[Path, Path], draft: Path) -> None:
    def swap(tokenizer: dict[str, Any]) -> None:
        vocab = tokenizer["model"]["vocab"]
        vocab["a"], vocab["b"] = vocab["b"], vocab["a"]

    edit(draft, "tokenizer.json", swap)
    refused = refused_by(check_pair(pair[0], draft))
    assert "2 texts" in refused["sglang"]


def test_a_text_that_only_the_drafter_has_is_found(pair: tuple[Path, Path], draft: Path) -> None:
    def add(tokenizer: dict[str, Any]) -> None:
        tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 384, "content": "<|new|>"})

    edit(draft, "tokenizer.json", add)
    assert "every token text has the same id" in broken(pair[0], draft)


@pytest.mark.parametrize("key", ["bos", "eos", "pad"])
def test_special_ids_are_compared(pair: tuple[Path, Path], draft: Path, key: str) -> None:
    edit(draft, "generation_config.json", lambda config: config.update({f"{key}_token_id": 77}))
    assert broken(pair[0], draft) == {f"{key} ids are equal"}


def test_a_short_context_a_misread_name_and_a_wrong_tie_are_found(
    pair: tuple[Path, Path], draft: Path
) -> None:
    edit(draft, "config.json", lambda config: config.update(max_position_embeddings=100))
    assert broken(pair[0], draft) == {"the drafter's context is at least the target's"}
    edit(draft, "config.json", lambda config: config.update(max_position_embeddings=4096))
    assert broken(pair[0], draft) == set()
    assert broken(pair[0], draft, Path("/models/eagle3-draft")) == {
        "the path does not look like another kind of drafter"
    }
    edit(draft, "config.json", lambda config: config.update(tie_word_embeddings=False))
    assert broken(pair[0], draft) == {"tie_word_embeddings says what the weights are"}


def test_a_drafter_that_sees_pictures_is_refused(pair: tuple[Path, Path], draft: Path) -> None:
    edit(draft, "config.json", lambda config: config.update(vision_config={}))
    assert broken(pair[0], draft) == {"the drafter is a plain text model"}


def test_tensor_parallel_sizes_fit_both_models(pair: tuple[Path, Path]) -> None:
    def side(heads: int, shared: int) -> Side:
        return Side({"num_attention_heads": heads, "num_key_value_heads": shared}, {}, {}, frozenset())

    assert tensor_parallel_sizes(side(32, 8), side(16, 8)) == [1, 2, 4, 8]
    assert tensor_parallel_sizes(side(32, 8), side(14, 2)) == [1, 2]  # Qwen2.5-0.5B has 14 heads
    assert tensor_parallel_sizes(side(9, 3), side(9, 3)) == [1]
    assert tensor_parallel_sizes(*map(read_side, pair)) == [1, 2, 4]


def test_the_vocabulary_hash_follows_text_and_id_alone() -> None:
    assert vocabulary_hash({"a": 0, "b": 1}) == vocabulary_hash({"b": 1, "a": 0})
    assert vocabulary_hash({"a": 0, "b": 1}) != vocabulary_hash({"a": 1, "b": 0})
    assert vocabulary_hash({"a": 0}) != vocabulary_hash({"a": 0, "b": 1})


WORDS = tuple(f"w{i}" for i in range(300))
VOCABULARY = GgufVocabulary("gpt2", WORDS, bos=1, eos=2, add_bos=False, add_eos=False)


@pytest.mark.parametrize(
    ("change", "rules"),
    [
        ({}, set()),
        ({"kind": "llama"}, {"vocabulary type"}),
        ({"bos": 9}, set()),  # not added, so not compared
        ({"add_bos": True}, {"bos is added alike"}),
        ({"tokens": (*WORDS, *WORDS[:128])}, set()),
        ({"tokens": (*WORDS, *WORDS[:129])}, {"at most 128 ids apart"}),
        ({"tokens": ("other", *WORDS[1:])}, set()),  # ids below 5 are not compared
        ({"tokens": (*WORDS[:5], "other", *WORDS[6:])}, {"texts are equal from id 5 on"}),
    ],
)
def test_llama_cpps_own_check(change: dict[str, Any], rules: set[str]) -> None:
    checks = llama_cpp_checks(VOCABULARY, dataclasses.replace(VOCABULARY, **change))
    assert {check.rule for check in checks if not check.ok} == rules


def test_llama_cpp_compares_the_ids_that_are_added() -> None:
    adds = dataclasses.replace(VOCABULARY, add_eos=True)
    checks = llama_cpp_checks(adds, dataclasses.replace(adds, eos=9))
    assert {check.rule for check in checks if not check.ok} == {"eos is added alike"}
