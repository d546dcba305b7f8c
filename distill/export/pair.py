"""Preflight of a pair: what each server checks, or fails to check, before it speculates with a drafter.

Servers compare the two models in different ways, and some go on silently without speculation when they do not
like what they see. Each check here replays one such rule on the two directories (for llama.cpp: on the two
GGUF files) and says in a sentence what was found.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.files import canonical_hash
from distill.export.directory import MISREAD_NAMES

LLAMA_CPP_VOCAB_DIFFERENCE = 128  # llama.cpp's own limit on the difference in the number of ids
LLAMA_CPP_FIRST_CHECKED_ID = 5  # it compares texts from this id on
TENSOR_PARALLEL_SIZES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Check:
    """One rule of some servers, and whether the pair keeps it."""

    servers: tuple[str, ...]
    rule: str
    ok: bool
    found: str
    """What is there, and what follows where the rule is broken."""


@dataclass(frozen=True)
class Side:
    """What servers read of one of the two models."""

    config: Mapping[str, Any]
    vocabulary: Mapping[str, int]
    """Token text to id, added tokens included."""
    special: Mapping[str, Any]
    """bos, eos and pad ids; generation_config.json goes before config.json."""
    tensors: frozenset[str]


@dataclass(frozen=True)
class GgufVocabulary:
    """What llama.cpp compares: the header fields of a GGUF file."""

    kind: str
    tokens: Sequence[str]
    bos: int | None
    eos: int | None
    add_bos: bool
    add_eos: bool


def check_pair(target: Path, draft: Path, name: Path | None = None) -> list[Check]:
    """All checks on two Hugging Face directories; `name` is where the drafter will stand (default:
    `draft`).
    """
    mine, theirs = read_side(draft), read_side(target)
    return [
        *_vocabulary_checks(theirs, mine),
        *_id_checks(theirs, mine),
        _context_check(theirs, mine),
        _name_check(name or draft),
        _tie_check(mine),
        _text_only_check(mine),
    ]


def refused_by(checks: Sequence[Check]) -> dict[str, str]:
    """Server -> why it does not take the drafter, for those with a broken rule."""
    return {server: check.found for check in reversed(checks) if not check.ok for server in check.servers}


def read_side(directory: Path) -> Side:
    """Read what servers compare from a Hugging Face directory."""
    whole = _json(directory / "config.json")
    config = {**whole, **whole.get("text_config", {})}
    generation = _json(directory / "generation_config.json")
    special = {
        key: generation.get(f"{key}_token_id", config.get(f"{key}_token_id")) for key in ("bos", "eos", "pad")
    }
    return Side(config, vocabulary(directory), special, frozenset(_tensor_names(directory)))


def vocabulary(directory: Path) -> dict[str, int]:
    """Token text to id of the tokenizer in a directory, added tokens included: what SGLang compares."""
    if (directory / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        found: dict[str, int] = Tokenizer.from_file(str(directory / "tokenizer.json")).get_vocab()
        return found
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    return dict(tokenizer.get_vocab())


def vocabulary_hash(vocabulary: Mapping[str, int]) -> str:
    """16 hex digits that are equal for two vocabularies with the same texts under the same ids."""
    return canonical_hash(dict(vocabulary))


def _vocabulary_checks(target: Side, draft: Side) -> Iterator[Check]:
    sizes = (target.config["vocab_size"], draft.config["vocab_size"])
    equal = sizes[0] == sizes[1]
    yield Check(
        ("vllm", "sglang", "transformers", "openvino", "onnx", "tensorrt-llm"),
        "vocab_size of the two configs is equal",
        equal,
        f"both have {sizes[0]}"
        if equal
        else f"the target's config has {sizes[0]} ids, the drafter's {sizes[1]}",
    )
    moved = sorted(
        (number, text) for text, number in target.vocabulary.items() if draft.vocabulary.get(text) != number
    )
    same = not moved and len(target.vocabulary) == len(draft.vocabulary)
    yield Check(
        ("sglang", "tensorrt-llm", "vllm", "transformers", "openvino", "onnx"),
        "every token text has the same id",
        same,
        f"{len(target.vocabulary)} texts agree"
        if same
        else f"{len(moved)} texts of the target differ in the drafter's tokenizer"
        + (f", first {moved[0][1]!r} (id {moved[0][0]})" if moved else ", which has texts of its own"),
    )


def _id_checks(target: Side, draft: Side) -> Iterator[Check]:
    for key in ("bos", "eos", "pad"):
        pair = (target.special[key], draft.special[key])
        yield Check(
            ("tensorrt-llm", "transformers"),
            f"{key} ids are equal",
            pair[0] == pair[1],
            f"the target has {pair[0]}, the drafter {pair[1]}",
        )


def _context_check(target: Side, draft: Side) -> Check:
    lengths = [int(side.config.get("max_position_embeddings") or 0) for side in (target, draft)]
    return Check(
        ("vllm",),
        "the drafter's context is at least the target's",
        lengths[1] >= lengths[0],
        f"target {lengths[0]}, drafter {lengths[1]} positions; vLLM also takes a smaller --max-model-len",
    )


def _name_check(name: Path) -> Check:
    misread = [word for word in MISREAD_NAMES if word in str(name).lower()]
    found = f"the path contains {misread[0]!r}" if misread else "the path names no other kind of drafter"
    return Check(("vllm",), "the path does not look like another kind of drafter", not misread, found)


def _tie_check(draft: Side) -> Check:
    tied = bool(draft.config.get("tie_word_embeddings", False))
    stored = "lm_head.weight" in draft.tensors
    return Check(
        ("vllm", "sglang", "llama.cpp", "tensorrt-llm", "transformers", "openvino", "onnx"),
        "tie_word_embeddings says what the weights are",
        tied != stored,
        f"tie_word_embeddings is {str(tied).lower()} and lm_head.weight is {'' if stored else 'not '}stored",
    )


def _text_only_check(draft: Side) -> Check:
    rope = draft.config.get("rope_parameters") or draft.config.get("rope_scaling") or {}
    odd = [key for key in ("vision_config", "audio_config") if key in draft.config]
    odd += ["M-RoPE"] if "mrope_section" in rope else []
    found = f"it has {', '.join(odd)}" if odd else "text only"
    return Check(("vllm", "sglang"), "the drafter is a plain text model", not odd, found)


def tensor_parallel_sizes(target: Side, draft: Side) -> list[int]:
    """Numbers of GPUs over which both models split: servers split the drafter as they split the target."""
    sides = (target.config, draft.config)
    return [size for size in TENSOR_PARALLEL_SIZES if all(_splits(config, size) for config in sides)]


def _splits(config: Mapping[str, Any], size: int) -> bool:
    heads = int(config.get("num_attention_heads") or 1)
    shared = int(config.get("num_key_value_heads") or heads)
    return heads % size == 0 and (shared % size == 0 or size % shared == 0)


def check_gguf_pair(target: Path, draft: Path) -> list[Check]:
    """llama.cpp's own load check of a drafter, replayed on the two files.

    A server that finds one of these broken says so at a low log level only and serves without speculation.
    """
    return llama_cpp_checks(read_gguf(target), read_gguf(draft))


def llama_cpp_checks(target: GgufVocabulary, draft: GgufVocabulary) -> list[Check]:
    """The rules of llama.cpp's `common_speculative_are_compatible`, one by one."""

    def check(rule: str, ok: bool, found: str) -> Check:
        return Check(("llama.cpp",), rule, ok, found)

    checks = [check("vocabulary type", target.kind == draft.kind, f"{target.kind} and {draft.kind}")]
    for key in ("bos", "eos"):
        added = (getattr(target, f"add_{key}"), getattr(draft, f"add_{key}"))
        ids = (getattr(target, key), getattr(draft, key))
        ok = added[0] == added[1] and (not added[0] or ids[0] == ids[1])
        checks.append(check(f"{key} is added alike", ok, f"added: {added}, ids: {ids}"))
    sizes = (len(target.tokens), len(draft.tokens))
    near = abs(sizes[0] - sizes[1]) <= LLAMA_CPP_VOCAB_DIFFERENCE
    limit = f"at most {LLAMA_CPP_VOCAB_DIFFERENCE} ids apart"
    checks.append(check(limit, near, f"target {sizes[0]}, drafter {sizes[1]} ids"))
    pairs = list(zip(target.tokens, draft.tokens, strict=False))
    different = [i for i, (a, b) in enumerate(pairs) if i >= LLAMA_CPP_FIRST_CHECKED_ID and a != b]
    found = f"{len(different)} texts differ" + (
        f", first {pairs[different[0]][0]!r} and {pairs[different[0]][1]!r} (id {different[0]})"
        if different
        else ""
    )
    checks.append(check(f"texts are equal from id {LLAMA_CPP_FIRST_CHECKED_ID} on", not different, found))
    return checks


def read_gguf(path: Path) -> GgufVocabulary:
    """The vocabulary in the header of a GGUF file, as llama.cpp reads it."""
    from gguf import GGUFReader

    fields = GGUFReader(path).fields

    def value(key: str) -> Any:
        field = fields.get(f"tokenizer.ggml.{key}")
        return None if field is None else field.contents()

    return GgufVocabulary(
        kind=str(value("model")),
        tokens=value("tokens"),
        bos=value("bos_token_id"),
        eos=value("eos_token_id"),
        # llama.cpp's defaults where the header says nothing: SentencePiece vocabularies begin with bos
        add_bos=bool(
            value("add_bos_token") if value("add_bos_token") is not None else value("model") == "llama"
        ),
        add_eos=bool(value("add_eos_token")),
    )


def _tensor_names(directory: Path) -> list[str]:
    from safetensors import safe_open

    names: list[str] = []
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            names += weights.keys()
    return names


def _json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text("utf-8"))) if path.is_file() else {}
