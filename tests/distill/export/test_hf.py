"""The exported directory: what is in it, that no filled row is ever drafted, and that transformers
speculates with it.
"""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from data.errors import UserError
from data.files import sha256_file
from distill.export import ExportConfig
from distill.export.hf import expand_vocabulary, export_hf, fill_row
from distill.export.pair import check_pair
from distill.export.verify import same_logits, verify_hf
from distill.models import load_drafter, save_drafter
from evaluation.decoder.drafters import DraftModel

VOCAB = 96
PROMPTS = ["w3 w14 w15", "w9 w2", "w6 w5 w3 w5 w8"]
DRAFT_VOCAB = [0, 1, 2, *range(20, 60)]  # ids 3 to 19 are missing, also before the first rare id
EVALUATION = {
    "machine": {"cpu": "x86 <b>", "cores": 2},
    "serving": {"temperature": 0.0, "batch_size": 1},
    "acceptance": [
        {
            "split": "seen",
            "task": "all",
            "temperature": 0.0,
            "tokens": 9,
            "samples": 3,
            "greedy": {"mean": 0.9, "low": 0.8, "high": 0.95},
        }
    ],
    "decode": [
        {
            "drafter": "model",
            "split": "seen",
            "num_speculative_tokens": 3,
            "prompts": 30,
            "tokens_per_target_call": {"mean": 3.5, "low": 3.0, "high": 4.0},
            "speedup": {"mean": 2.1, "low": 1.9, "high": 2.3},
        }
    ],
    "best": {"verdict": "Serve with K = 3."},
}
FACTS: dict[str, Any] = {
    "target_model": "org/target",
    "num_speculative_tokens": 3,
    "target_revision": "abc",
    "license": "apache-2.0",
    "recipe": "smoke",
    "serving": {"temperature": 0.0},
    "evaluation": EVALUATION,
}


def llama(seed: int, layers: int = 2, vocab: int = VOCAB, tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=tied,
        initializer_range=0.4,
        dtype="float32",
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("target")
    llama(0, layers=3).save_pretrained(directory)
    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    fast.save_pretrained(directory)
    return directory


@pytest.fixture
def out_dir(tmp_path: Path) -> Path:
    return tmp_path / "export"


def reduced(seed: int = 1) -> DraftModel:
    model = llama(seed)
    model.lm_head = torch.nn.Linear(32, len(DRAFT_VOCAB), bias=False)
    torch.nn.init.normal_(model.lm_head.weight, std=0.4)
    return DraftModel(model, torch.tensor(DRAFT_VOCAB))


def saved(drafter: DraftModel, tmp_path: Path) -> Path:
    save_drafter(drafter, tmp_path / "drafter")
    return tmp_path / "drafter"


def test_the_directory_holds_what_servers_compare(target_dir: Path, tmp_path: Path, out_dir: Path) -> None:
    drafter = saved(reduced(), tmp_path)
    export_hf(drafter, target_dir, out_dir, facts=FACTS)
    ours, theirs = (json.loads((path / "config.json").read_text()) for path in (out_dir, target_dir))
    for key in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings"):
        assert ours[key] == theirs[key]
    assert ours["architectures"] == ["LlamaForCausalLM"]
    assert ours["dtype"] == "float32"
    assert not ours["tie_word_embeddings"]
    generation = json.loads((out_dir / "generation_config.json").read_text())
    assert generation["num_assistant_tokens"] == 3
    assert generation["num_assistant_tokens_schedule"] == "constant"
    assert generation["assistant_confidence_threshold"] == 0.0
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (out_dir / name).read_bytes() == (target_dir / name).read_bytes()
    assert not (out_dir / "draft_vocab.json").exists()
    assert not list(out_dir.rglob("*.bin"))
    manifest = json.loads((out_dir / "manifest.json").read_text())
    assert all(check["ok"] for check in manifest["checks"])
    files = {str(p.relative_to(out_dir)) for p in out_dir.rglob("*") if p.is_file()} - {"manifest.json"}
    assert set(manifest["files"]) == files
    assert all(sha256_file(out_dir / name) == digest for name, digest in manifest["files"].items())
    assert manifest["expansion"]["filled"] == VOCAB - len(DRAFT_VOCAB)
    assert manifest["expansion"]["greedy_missing"] == 0


def test_the_card_has_metadata_measures_and_no_markup_from_outside(
    target_dir: Path, tmp_path: Path, out_dir: Path
) -> None:
    facts = {**FACTS, "recipe": "a`<b>", "candidate": "https://me:hf_abcdefghijk@host/m"}
    export_hf(saved(reduced(), tmp_path), target_dir, out_dir, facts=facts)
    _, front, body = (out_dir / "README.md").read_text().split("---\n", 2)
    meta = yaml.safe_load(front)
    assert meta["license"] == "apache-2.0"
    assert meta["base_model"] == "org/target"
    assert "speculative-decoding" in meta["tags"]
    for said in ("2.10 [1.90, 2.30]", "| 30 |", "0.900 [0.800, 0.950]", "x86", "Serve with K = 3."):
        assert said in body
    assert "<b>" not in body and "hf_abc" not in body and "me:" not in body


@pytest.mark.parametrize("seed", range(4))
def test_a_filled_id_is_never_drafted_whatever_the_state(seed: int) -> None:
    """Adversarial states: random ones, and ones along and against every head row and the filled row."""
    drafter = reduced(seed)
    drafter.model.lm_head.weight.data += 0.5  # so that some states make all logits negative
    head = drafter.model.lm_head.weight.data.clone()
    expand_vocabulary(drafter, VOCAB, 2, [[1, 20, 30, 40, 50]])
    full = drafter.model.lm_head.weight.data
    filled = [i for i in range(VOCAB) if i not in DRAFT_VOCAB]
    row = full[filled[0]]
    assert bool((full[filled] == row).all())
    states = torch.cat([torch.randn(5000, 32) * 10, head, -head, row[None], -row[None], -torch.ones(1, 32)])
    logits = states @ full.T
    assert not set(logits.argmax(dim=-1).tolist()) & set(filled)
    reduced_choice = torch.tensor(DRAFT_VOCAB)[(states @ head.T).argmax(dim=-1)]
    assert torch.equal(logits.argmax(dim=-1), reduced_choice)
    # Negative controls: zero rows and one copied row are drafted for some of these states.
    for fill in (torch.zeros(32), head[-1]):
        full[filled] = fill
        assert set((states @ full.T).argmax(dim=-1).tolist()) & set(filled)


def test_fill_takes_the_least_likely_rows_and_spares_excluded_ones() -> None:
    states = torch.eye(4)[:1].repeat(8, 1)
    head = torch.diag(torch.ones(4))
    head[:, 0] = torch.tensor([5.0, -9.0, -3.0, -5.0])  # logits of every state
    none = torch.zeros(4, dtype=torch.bool)
    assert torch.equal(fill_row(head, states, none), (head[1] + head[3]) / 2)
    assert torch.equal(
        fill_row(head, states, torch.tensor([False, True, False, False])), (head[2] + head[3]) / 2
    )


def test_greedy_drafts_of_the_export_are_the_drafters_own(
    target_dir: Path, tmp_path: Path, out_dir: Path
) -> None:
    drafter_dir = saved(reduced(), tmp_path)
    export_hf(drafter_dir, target_dir, out_dir, facts=FACTS, calibration=[[1, 20, 30, 40], [5, 6]])
    assert json.loads((out_dir / "manifest.json").read_text())["expansion"]["positions"] == 6
    drafter = load_drafter(drafter_dir, "cpu")
    ids = torch.randint(VOCAB, (8, 24), generator=torch.Generator().manual_seed(3))
    assert drafter.vocab is not None
    with torch.inference_mode():
        wanted = drafter.vocab[drafter.model(ids).logits.argmax(dim=-1)]
        exported = AutoModelForCausalLM.from_pretrained(out_dir)
        assert torch.equal(exported(ids).logits.argmax(dim=-1), wanted)
        huge = [i for i in range(VOCAB) if i not in DRAFT_VOCAB]
        exported.lm_head.weight[huge] = 50.0 * torch.randn(32)
        assert not torch.equal(exported(ids).logits.argmax(dim=-1), wanted)  # negative control


@pytest.mark.parametrize("vocab", [90, 128])
@pytest.mark.parametrize("tied", [False, True])
def test_padded_vocabularies_of_one_family_become_equal(
    target_dir: Path, tmp_path: Path, out_dir: Path, vocab: int, tied: bool
) -> None:
    export_hf(saved(DraftModel(llama(4, vocab=vocab, tied=tied)), tmp_path), target_dir, out_dir, facts=FACTS)
    model = AutoModelForCausalLM.from_pretrained(out_dir)
    assert model.get_input_embeddings().weight.shape[0] == VOCAB
    assert model.lm_head.weight.shape[0] == VOCAB
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
    original = llama(4, vocab=vocab, tied=tied)
    kept = min(vocab, VOCAB)
    assert torch.equal(model.lm_head.weight[:kept], original.lm_head.weight[:kept])


def test_transformers_assists_with_it_and_the_text_stays(
    target_dir: Path, tmp_path: Path, out_dir: Path
) -> None:
    export_hf(saved(reduced(), tmp_path), target_dir, out_dir, facts=FACTS)
    verification = verify_hf(out_dir, target_dir, PROMPTS, max_new_tokens=24)
    assert (
        verification.identical == verification.prompts == 3
    )  # whatever is drafted, the text is the target's


def test_a_drafter_equal_to_the_target_is_accepted(target_dir: Path, tmp_path: Path, out_dir: Path) -> None:
    twin = saved(DraftModel(llama(0, layers=3)), tmp_path)
    export_hf(twin, target_dir, out_dir, facts=FACTS)
    verification = verify_hf(out_dir, target_dir, PROMPTS, max_new_tokens=24)
    assert verification.ok
    assert verification.tokens_per_target_call > 3  # K + 1 = 4, less at the ends
    # Negative control: a drafter that always proposes one id is never accepted, and that is no success.
    stubborn = llama(0, layers=3)
    stubborn.lm_head.weight.data[:] = 0
    export_hf(saved(DraftModel(stubborn), tmp_path), target_dir, out_dir, facts=FACTS, force=True)
    verification = verify_hf(out_dir, target_dir, PROMPTS, max_new_tokens=24)
    assert verification.identical == 3 and not verification.ok


def test_an_export_is_replaced_whole_or_stays(
    target_dir: Path, tmp_path: Path, out_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = saved(reduced(), tmp_path)
    export_hf(drafter, target_dir, out_dir, facts=FACTS)
    before = sha256_file(out_dir / "manifest.json")
    monkeypatch.setattr("distill.export.hf.serve_files", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export_hf(drafter, target_dir, out_dir, facts=FACTS, force=True)
    assert sha256_file(out_dir / "manifest.json") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["drafter", "export"]  # no leftovers


def test_the_logits_are_the_trained_drafters_bit_for_bit(
    target_dir: Path, tmp_path: Path, out_dir: Path
) -> None:
    from safetensors.torch import load_file, save_file

    drafter = saved(reduced(), tmp_path)
    export_hf(drafter, target_dir, out_dir, facts=FACTS)
    texts = [[1, 20, 30, 40, 50, 3, 4], [9, 9, 9]]
    assert same_logits(out_dir, drafter, texts)
    for name, row in (("model.norm.weight", 0), ("lm_head.weight", DRAFT_VOCAB[5])):  # negative controls
        weights = load_file(out_dir / "model.safetensors")
        kept = weights[name].clone()
        changed = weights[name].view(-1, weights[name].shape[-1])
        changed[row] += 1e-6
        save_file(weights, out_dir / "model.safetensors", metadata={"format": "pt"})
        assert not same_logits(out_dir, drafter, texts), name
        save_file({**weights, name: kept}, out_dir / "model.safetensors", metadata={"format": "pt"})
    assert same_logits(out_dir, drafter, texts)


def test_padded_vocabularies_of_qwens_sizes_come_out_loadable(tmp_path: Path) -> None:
    """151,936 rows against 152,064, with 151,665 texts in both tokenizers, as in Qwen2.5."""
    target, drafter = tmp_path / "target", tmp_path / "drafter"
    words = {f"w{i}": i for i in range(151665)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), eos_token="w2", pad_token="w0"
    )
    narrow(0, 152064, False).save_pretrained(target)
    tokenizer.save_pretrained(target)
    save_drafter(DraftModel(narrow(1, 151936, True)), drafter, tokenizer)
    export_hf(drafter, target, tmp_path / "out", facts=FACTS)
    refused = {check.rule for check in check_pair(target, drafter) if not check.ok}
    assert "vocab_size of the two configs is equal" in refused  # as it was, vLLM would raise
    assert all(check.ok for check in check_pair(target, tmp_path / "out"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.vocab_size == 152064 and model.config.tie_word_embeddings
    assert same_logits(tmp_path / "out", drafter, [[5, 6, 151000, 7]])


def narrow(seed: int, vocab: int, tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=tied,
        dtype="float32",
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("name", ["my-eagle-draft", "EAGLE3", "dflash", "x-dspark", "medusa/inner"])
def test_names_that_vllm_misreads_are_refused(target_dir: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="vLLM"):
        export_hf(tmp_path / "unread", target_dir, tmp_path / name, facts=FACTS)


def test_a_target_without_tokenizer_or_config_is_refused(tmp_path: Path, out_dir: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json"):
        export_hf(tmp_path / "d", tmp_path, out_dir, facts=FACTS)
    llama(0).save_pretrained(tmp_path / "bare")
    with pytest.raises(UserError, match="tokenizer"):
        export_hf(tmp_path / "d", tmp_path / "bare", out_dir, facts=FACTS)


def test_export_config_refuses_unknown_formats_and_keys() -> None:
    assert ExportConfig().formats == ["hf"]
    bads: list[dict[str, Any]] = [{"formats": ["tflite"]}, {"formats": []}, {"format": ["hf"]}]
    for bad in bads:
        with pytest.raises(ValueError):
            ExportConfig.model_validate(bad)


def test_the_transformers_example_runs(
    target_dir: Path,
    tmp_path: Path,
    out_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    export_hf(
        saved(reduced(), tmp_path), target_dir, out_dir, facts={**FACTS, "target_model": str(target_dir)}
    )
    monkeypatch.setattr("sys.argv", ["example", "w3", "w4"])
    path = out_dir / "serve" / "transformers_example.py"
    spec = importlib.util.spec_from_file_location("example", path)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert capsys.readouterr().out.strip()
