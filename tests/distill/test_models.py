import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from data.errors import UserError
from data.files import replace_directory
from distill.models import (
    Target,
    TargetConfig,
    cast_parameters,
    check_head,
    load_drafter,
    load_model,
    load_target,
    save_drafter,
)
from distill.prune import prune
from distill.resolve import model_digest, resolve_model
from evaluation.decoder.drafters import DraftModel

VOCAB = torch.tensor([0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89])


def reduced_drafter(target: Target) -> DraftModel:
    model = prune(target.model, [0, 2], target.model.lm_head.weight[VOCAB])
    return DraftModel(model, VOCAB)


@pytest.fixture
def target_dir(target: Target, tmp_path: Path) -> Path:
    target.model.save_pretrained(tmp_path / "target")
    target.tokenizer.save_pretrained(tmp_path / "target")
    return tmp_path / "target"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_reduced_drafter_reloads_bit_for_bit(target: Target, tmp_path: Path, dtype: torch.dtype) -> None:
    drafter = reduced_drafter(target)
    cast_parameters(drafter.model, dtype)
    save_drafter(drafter, tmp_path / "drafter", target.tokenizer)
    loaded = load_drafter(tmp_path / "drafter", "cpu")
    assert loaded.vocab is not None and loaded.vocab.tolist() == VOCAB.tolist()
    assert loaded.model.dtype == dtype and not loaded.model.training
    ours, theirs = drafter.model.state_dict(), loaded.model.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    ids = torch.arange(20).reshape(2, 10)
    # equal logits show that the rotary buffers, which no file holds, are there too
    assert torch.equal(drafter.model(ids).logits, loaded.model(ids).logits)
    config = json.loads((tmp_path / "drafter" / "config.json").read_text())
    assert config["vocab_size"] == 96 and not config["tie_word_embeddings"]
    assert load_file(tmp_path / "drafter" / "model.safetensors")["lm_head.weight"].shape == (len(VOCAB), 32)


def test_a_full_drafter_is_an_ordinary_directory(target: Target, tmp_path: Path) -> None:
    drafter = DraftModel(prune(target.model, [1], target.model.lm_head.weight), None)
    save_drafter(drafter, tmp_path / "drafter")
    loaded = load_drafter(tmp_path / "drafter", "cpu")
    plain = LlamaForCausalLM.from_pretrained(tmp_path / "drafter")
    ids = torch.arange(10).unsqueeze(0)
    assert loaded.vocab is None
    assert torch.equal(loaded.model(ids).logits, drafter.model(ids).logits)
    assert torch.equal(plain(ids).logits, drafter.model(ids).logits)


def test_saving_again_replaces_the_whole_directory(target: Target, tmp_path: Path) -> None:
    save_drafter(reduced_drafter(target), tmp_path / "drafter")
    save_drafter(
        DraftModel(prune(target.model, [0], target.model.lm_head.weight), None), tmp_path / "drafter"
    )
    assert load_drafter(tmp_path / "drafter", "cpu").vocab is None  # no stale draft_vocab.json
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]


def test_a_failure_leaves_the_old_directory(tmp_path: Path) -> None:
    replace_directory(tmp_path / "it", lambda folder: (folder / "a").write_text("old"))

    def fail(folder: Path) -> None:
        (folder / "a").write_text("new")
        raise RuntimeError

    with pytest.raises(RuntimeError):
        replace_directory(tmp_path / "it", fail)
    assert (tmp_path / "it" / "a").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["it"]


@pytest.mark.parametrize("ids", [[3, 2], [1, 1], [5, 96], [-1, 4], []])
def test_a_bad_draft_vocab_is_refused(target: Target, tmp_path: Path, ids: list[int]) -> None:
    save_drafter(reduced_drafter(target), tmp_path / "drafter")
    (tmp_path / "drafter" / "draft_vocab.json").write_text(json.dumps(ids))
    with pytest.raises(UserError, match="rising list of ids below 96"):
        load_drafter(tmp_path / "drafter", "cpu")


def test_no_drafter(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json is missing"):
        load_drafter(tmp_path, "cpu")


def test_weights_that_do_not_fit_are_refused_not_filled(target_dir: Path) -> None:
    config = json.loads((target_dir / "config.json").read_text())
    (target_dir / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 5}))
    with pytest.raises(UserError, match="do not fit"):
        load_model(target_dir, torch.float32)


def test_load_target(target: Target, target_dir: Path, tmp_path: Path) -> None:
    loaded = load_target(TargetConfig(model=str(target_dir), dtype="bfloat16"), tmp_path / "cache", "cpu")
    assert loaded.eos_ids == (2,) and loaded.pad_id == 2
    assert loaded.model.dtype == torch.bfloat16 and not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight  # tied
    assert loaded.tokenizer.get_vocab() == target.tokenizer.get_vocab()
    generation = json.loads((target_dir / "generation_config.json").read_text())
    (target_dir / "generation_config.json").write_text(json.dumps({**generation, "eos_token_id": [2, 7]}))
    changed = load_target(TargetConfig(model=str(target_dir)), tmp_path / "cache", "cpu")
    assert changed.eos_ids == (2, 7)
    assert changed.digest != loaded.digest


def test_digest_follows_the_weights_and_hub_commits(target: Target, target_dir: Path, tmp_path: Path) -> None:
    before = model_digest(target_dir)
    assert model_digest(target_dir) == before
    (target_dir / "notes.md").write_text("no part of the model")
    assert model_digest(target_dir) == before
    weights = bytearray((target_dir / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (target_dir / "model.safetensors").write_bytes(bytes(weights))
    assert model_digest(target_dir) != before
    assert model_digest(tmp_path / "models--a--b" / "snapshots" / "c0ffee") == "c0ffee"


def test_random_targets_are_made_once(tmp_path: Path) -> None:
    path = resolve_model("random:7", None, tmp_path)
    marker = path / "config.json"
    written = marker.stat().st_mtime_ns
    assert resolve_model("random:7", None, tmp_path) == path and marker.stat().st_mtime_ns == written
    load_target(TargetConfig(model="random:7"), tmp_path, "cpu")


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("package:no_such_package/x.gguf", "no_such_package is not installed"),
        ("package:json/../x.gguf", "must read package:PACKAGE/FILE"),
        ("package:json/absent.gguf", "there is no file"),
        ("random:x", "must read random:SEED"),
        ("./nowhere", "there is no directory"),
        ("/nowhere/at/all", "there is no directory"),
        ("nowhere.gguf", "there is no file"),
    ],
)
def test_models_that_are_not_there(model: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        resolve_model(model, None, tmp_path)


def test_directories_that_are_no_models(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.json"):
        resolve_model(str(tmp_path), None, tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(UserError, match="no safetensors"):
        resolve_model(str(tmp_path), None, tmp_path)


def test_hub_failures_become_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub import errors

    failures: dict[type[Exception], str] = {
        errors.GatedRepoError: "licence",
        errors.RepositoryNotFoundError: "nor the hub has",
        errors.RevisionNotFoundError: "no revision v1",
        errors.LocalEntryNotFoundError: "cannot be reached",
        ConnectionError: "cannot be reached",
    }
    for failure, words in failures.items():

        def fail(*_: object, failure: type[Exception] = failure, **__: object) -> str:
            raise failure.__new__(failure)  # the hub's errors want a whole HTTP response

        monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
        with pytest.raises(UserError, match=words):
            resolve_model("owner/name", "v1", tmp_path)


def test_a_model_that_changes_its_logits_in_its_own_way_is_refused(target: Target) -> None:
    check_head(target.model, "tiny")
    stray = prune(target.model, [0], target.model.lm_head.weight)
    stray.config.final_logit_softcapping = 30.0  # which no Llama looks at, small as its logits may be
    with torch.no_grad():
        stray.lm_head.weight *= 50
    with pytest.raises(UserError, match=r"stray \(LlamaForCausalLM\).*final_logit_softcapping.*another kind"):
        check_head(stray, "stray")
    odd = prune(target.model, [0], target.model.lm_head.weight)
    odd.lm_head.register_forward_hook(lambda module, inputs, output: output.clamp(max=0.1))
    with pytest.raises(UserError, match="none known here"):
        check_head(odd, "odd")


def test_gguf_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small GGUF written here, read by transformers, becomes safetensors with the same weights."""
    gguf = write_gguf(tmp_path / "tiny.gguf")
    converted = resolve_model(str(gguf), None, tmp_path / "cache")
    model = load_model(converted, torch.float32)
    assert not hasattr(model.config, "quantization_config")
    assert torch.equal(model.model.norm.weight, torch.full((32,), 0.5))

    def fail(*_: object) -> None:
        raise AssertionError("converted twice")

    monkeypatch.setattr("distill.resolve._convert", fail)
    assert resolve_model(str(gguf), None, tmp_path / "cache") == converted
    (converted / "converted.json").unlink()  # a conversion that did not reach its end does not count
    with pytest.raises(AssertionError, match="converted twice"):
        resolve_model(str(gguf), None, tmp_path / "cache")


def write_gguf(path: Path) -> Path:
    import numpy as np
    from gguf import GGUFWriter

    generator = np.random.default_rng(0)

    def weight(*shape: int) -> np.ndarray:
        return generator.standard_normal(shape).astype(np.float32)

    tokens = ["w", "0", "w0", *(f"t{index}" for index in range(93))]
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(96)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_merges(["w 0"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_tensor("token_embd.weight", weight(96, 32))
    writer.add_tensor("output_norm.weight", np.full(32, 0.5, dtype=np.float32))
    for name, shape in {
        "attn_q": (32, 32),
        "attn_k": (16, 32),
        "attn_v": (16, 32),
        "attn_output": (32, 32),
        "ffn_gate": (64, 32),
        "ffn_up": (64, 32),
        "ffn_down": (32, 64),
    }.items():
        writer.add_tensor(f"blk.0.{name}.weight", weight(*shape))
    for name in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"blk.0.{name}.weight", np.ones(32, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
