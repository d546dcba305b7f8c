"""Targets and drafters that are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from distill import cli
from tests.bad_input.recipes import FEW, mine


def editor(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file; None takes one out."""
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def reweigh(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})


def first(tensors: dict[str, torch.Tensor], value: float) -> dict[str, torch.Tensor]:
    tensors["model.norm.weight"][3] = value
    return tensors


def flip_header(folder: Path) -> None:
    raw = bytearray((folder / "model.safetensors").read_bytes())
    raw[20] ^= 0xFF
    (folder / "model.safetensors").write_bytes(bytes(raw))


def cut(folder: Path) -> None:
    raw = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(raw[: len(raw) // 2])


def pickle_only(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def config(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: editor(folder / "config.json", **changes)


def write(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


def remove(*names: str) -> Callable[[Path], None]:
    return lambda folder: [(folder / name).unlink() for name in names]  # type: ignore[return-value]


def no_end(folder: Path) -> None:
    for name, key in (("config", "eos_token_id"), ("tokenizer_config", "eos_token")):
        values = json.loads((folder / f"{name}.json").read_text())
        (folder / f"{name}.json").write_text(json.dumps({**values, key: None}))
    (folder / "generation_config.json").unlink()


def custom_code(folder: Path) -> None:
    names = {"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.Model"}
    editor(folder / "config.json", model_type="theirs", auto_map=names)
    (folder / "theirs.py").write_text("import pathlib\npathlib.Path('/tmp/owned').touch()\n")


MODELS: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "no config": (remove("config.json"), ["config.json"]),
    "a config cut off": (write("config.json", '{"model_type": "lla'), ["config.json", "download"]),
    "a config that is a list": (write("config.json", "[]"), ["config.json", "download"]),
    "a config of no model": (write("config.json", "{}"), ["config.json"]),
    "an unknown model": (config(model_type="nothing-at-all"), ["config.json", "nothing-at-all"]),
    "code of its own": (custom_code, ["never run", "choose a model that transformers knows"]),
    "no weights": (remove("model.safetensors"), ["no weights"]),
    "pickled weights alone": (pickle_only, ["pickled", "never loaded", "save_pretrained"]),
    "weights cut off": (cut, ["weights", "download or save it again"]),
    "weights with a broken header": (flip_header, ["weights", "download or save it again"]),
    "weights of text": (write("model.safetensors", "git-lfs pointer"), ["weights", "download"]),
    "a layer's weights missing": (config(num_hidden_layers=5), ["do not fit its config", "layers.4"]),
    "weights of another width": (config(hidden_size=32), ["config"]),
    "fewer ids than rows": (config(vocab_size=300), ["tokenizer names id", "the model has ids 0 to 299"]),
    "NaN in the weights": (
        lambda folder: reweigh(folder, lambda tensors: first(tensors, torch.nan)), ["norm.weight", "NaN"],
    ),
    "an infinity in the weights": (
        lambda folder: reweigh(folder, lambda tensors: first(tensors, torch.inf)),
        ["model.norm.weight", "infinities"],
    ),
    "no tokenizer": (remove("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"), ["tokenizer"]),
    "a tokenizer cut off": (write("tokenizer.json", '{"version": "1.0", "mod'), ["tokenizer", "download"]),
    "a tokenizer of text": (write("tokenizer.json", "hello"), ["tokenizer", "download"]),
    "a chat template that is none": (write("chat_template.jinja", "{% for"), ["chat template", "mend"]),
    "a chat template that raises": (
        write("chat_template.jinja", "{{ raise_exception('no system turns') }}"), ["no system turns"],
    ),
    "a chat template that reaches for Python": (
        write("chat_template.jinja", "{{ messages.__class__.__mro__[1].__subclasses__() }}"),
        ["chat template", "SecurityError"],
    ),
    "a chat template without end": (
        write("chat_template.jinja", "{% for i in range(100000000000) %}x{% endfor %}"),
        ["chat template", "mend"],
    ),
    "a chat template that adds numbers to text": (
        write("chat_template.jinja", "{{ messages[0]['content'] + 1 }}"), ["chat template", "TypeError"],
    ),
    "no end of sequence": (no_end, ["no end-of-sequence token", "generation_config.json"]),
    "an end of sequence beyond the ids": (
        lambda folder: editor(folder / "generation_config.json", eos_token_id=[2, 999]), ["999", "0 to 383"],
    ),
    "a generation config cut off": (write("generation_config.json", '{"eos'), ["generation_config.json"]),
    "a sliding window": (
        config(model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=16),
        ["MistralForCausalLM", "sliding_attention", "full-attention"],
    ),
    "a cap on the logits": (config(final_logit_softcapping=30.0), ["final_logit_softcapping", "choose"]),
    "heads that do not divide": (config(num_attention_heads=5), ["config"]),
    "too few positions": (config(max_position_embeddings=64), ["data.max_prompt_tokens", "has 64"]),
    "a quantisation that is not installed": (
        config(quantization_config={"quant_method": "gptq", "bits": 4}), ["download or save it again"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MODELS)
def test_target(case: str, tmp_path: Path, refused: Callable[..., str], tiny_pair: tuple[Path, Path]) -> None:
    harm, words = MODELS[case]
    folder = shutil.copytree(tiny_pair[0], tmp_path / "target")
    harm(folder)
    message = refused("sample", mine(tmp_path, FEW), "--set", f"target.model={folder}")
    assert all(word in message for word in words), message
    assert str(folder) in message or "target" in message, "where"
    assert not Path("/tmp/owned").exists()


def permuted(folder: Path) -> None:
    values = json.loads((folder / "tokenizer.json").read_text())
    vocab = values["model"]["vocab"]
    (one, two), ids = list(vocab)[200:202], list(vocab.values())[200:202]
    vocab[one], vocab[two] = ids[1], ids[0]
    (folder / "tokenizer.json").write_text(json.dumps(values))


def shorter(folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<one-more>"])
    tokenizer.save_pretrained(folder)


def padded(folder: Path) -> None:
    def more(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        rows = tensors["model.embed_tokens.weight"]
        return {**tensors, "model.embed_tokens.weight": torch.cat([rows, rows[:64]])}

    editor(folder / "config.json", vocab_size=384 + 64)
    reweigh(folder, more)


DRAFTERS: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "a permuted vocabulary": (permuted, ["is not the target's", "2 tokens differ"]),
    "another tokenizer": (shorter, ["is not the target's", "family"]),
    "a padded vocabulary": (padded, ["embeds 448 ids and the target 384"]),
    "a tokenizer that is missing": (remove("tokenizer.json", "tokenizer_config.json"), ["tokenizer"]),
    "weights cut off": (cut, ["download or save it again"]),
    "NaN in the weights": (
        lambda folder: reweigh(folder, lambda tensors: first(tensors, torch.nan)), ["NaN", "norm.weight"],
    ),
    "pickled weights alone": (pickle_only, ["pickled"]),
    "a layout that is not Llama's": (
        config(model_type="gpt_neox", architectures=["GPTNeoXForCausalLM"]), ["do not fit its config.json"],
    ),
    "a draft vocabulary that repeats": (write("draft_vocab.json", "[1, 1]"), ["rising list of ids"]),
    "a draft vocabulary of words": (write("draft_vocab.json", '{"a": 1}'), ["draft_vocab.json"]),
}  # fmt: skip


BOTH = ("a permuted vocabulary", "a padded vocabulary", "weights cut off")  # the other way takes longer


@pytest.mark.parametrize(
    ("case", "setting"),
    [(case, "sample.drafter") for case in DRAFTERS] + [(case, "draft.init.from") for case in BOTH],
)
def test_drafter(
    case: str, setting: str, tmp_path: Path, refused: Callable[..., str], tiny_pair: tuple[Path, Path]
) -> None:
    harm, words = DRAFTERS[case]
    folder = shutil.copytree(tiny_pair[1], tmp_path / "family")
    harm(folder)
    settings = [f"target.model={tiny_pair[0]}", "sample.tokens=40", "train.tokens=40"]
    if setting == "sample.drafter":
        settings.append(f"sample.drafter={folder}")
    else:
        settings.append(f"draft.init={{from: '{folder}', layers: null}}")
    message = refused("train", mine(tmp_path, FEW), *(word for text in settings for word in ("--set", text)))
    assert all(word in message for word in words), message
    assert str(folder) in message, "where"
    other = "sample.drafter" if setting == "draft.init.from" else "draft.init.from"
    assert other not in message, "the wrong setting is blamed"


@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_untied_heads_and_a_missing_chat_template_are_fine(
    tied: bool, tmp_path: Path, tiny_pair: tuple[Path, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    """The corpus refuses what is wrong and nothing else."""
    folder = shutil.copytree(tiny_pair[0], tmp_path / "target")
    if not tied:
        editor(folder / "config.json", tie_word_embeddings=False)
        reweigh(folder, lambda t: {**t, "lm_head.weight": t["model.embed_tokens.weight"].clone()})
    (folder / "chat_template.jinja").unlink()
    settings = [f"target.model={folder}", "sample.tokens=40", "evaluate.prompts=2"]
    code = cli.main(["sample", mine(tmp_path, FEW), *(word for text in settings for word in ("--set", text))])
    assert code == 0, capfd.readouterr().err
