"""Bad input, from the command line down: each case is refused with one clear message, exit code 2 and no
traceback, and what stood in the runs folder before stands there afterwards.

A case is what is wrong, and the words that must be said: what, where, and what to do. Everything runs in this
process, on random tiny models.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from distill import cli
from distill.context import Run
from distill.recipe import RECIPES

SMOKE = (RECIPES / "smoke.yaml").read_text()
BOMB = "a: &a [x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [*{chr(97 + i)}, *{chr(97 + i)}]\n" for i in range(9)
)
COMMIT = "a" * 40
MOST_LINES = 6
"""Of a message: a sentence, or a heading with a line for each problem."""


class Untracked:
    """A tracker that keeps nothing: MLflow is not what is tested here."""

    offline = False

    @contextmanager
    def stage(self, name: str) -> Iterator[Untracked]:
        yield self

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One runs folder for all cases, with a finished stage that no case may touch."""
    folder = tmp_path_factory.mktemp("runs")
    kept = folder / "mine" / "sample-0123456789abcdef"
    kept.mkdir(parents=True)
    (kept / "samples-00000.parquet").write_bytes(b"hours of work")
    (kept / "manifest.json").write_text("{}")
    return folder


@pytest.fixture(autouse=True)
def _quick(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTILL_RUNS", str(runs))
    monkeypatch.setattr(Run, "tracker", Untracked())


@pytest.fixture
def refused(runs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command that must be refused; its message."""

    def refused(*words: str) -> str:
        before = contents(runs / "mine")
        code = cli.main(list(words))
        out, err = capfd.readouterr()
        message = err[err.rindex("recipe mine") if "recipe mine" in err else 0 :].strip()
        assert code == 2, err
        assert out == "" and "Traceback" not in err
        last = message.splitlines()[-MOST_LINES:]
        assert all(len(line) < 700 for line in last), "a wall of text is no message"
        after = contents(runs / "mine")
        assert {name: after.get(name) for name in before} == before, "something was lost"
        return message

    return refused


def contents(folder: Path) -> dict[str, str]:
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.glob("sample-0123456789abcdef/*")
    }


def mine(tmp_path: Path, text: str | bytes = SMOKE) -> str:
    path = tmp_path / "mine.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


# ---- recipes


def edited(old: str, new: str) -> str:
    assert old in SMOKE, old
    return SMOKE.replace(old, new, 1)


RECIPES_AND_WORDS: dict[str, tuple[str | bytes, list[str]]] = {
    "an unknown section": (SMOKE + "trian: {}\n", ["trian", "did you mean train?"]),
    "an unknown key": (edited("batch_size: 8", "batchsize: 8"), ["train.batchsize", "mean batch_size?"]),
    "an unknown key in a prompt source": (
        edited("count: 160", "cuont: 160"), ["data.prompts.0.cuont", "did you mean count?"],
    ),
    "a text for a number": (edited("tokens: 1200", "tokens: many"), ["sample.tokens", "'many'"]),
    "a quoted number": (edited("tokens: 1200", "tokens: '1200'"), ["sample.tokens", "'1200'"]),
    "a fraction for a whole number": (edited("tokens: 1200", "tokens: 1.5"), ["sample.tokens", "1.5"]),
    "a truth for a number": (edited("tokens: 1200", "tokens: yes"), ["sample.tokens", "True"]),
    "nothing for a number": (edited("tokens: 1200", "tokens:"), ["sample.tokens", "None"]),
    "a list for a section": (edited("train:\n", "train: [1]\nx:\n"), ["train"]),
    "a number for a section": (edited("export:", "export: 3\nevaluat:"), ["export"]),
    "a number for a text": (edited("dtype: float32", "dtype: 32"), ["target.dtype", "32"]),
    "a list for a text": (edited("model: random:1", "model: [random:1]"), ["target.model", "string"]),
    "an unknown choice": (edited("name: forward_kl", "name: forward_lk"), ["did you mean forward_kl?"]),
    "a section that is missing": (edited("serving:", "sreving:"), ["serving", "missing"]),
    "a value that is missing": (edited("  max_new_tokens: 16\n", ""), ["sample.max_new_tokens", "missing"]),
    "a negative number": (edited("tokens: 1200", "tokens: -1"), ["sample.tokens", "-1"]),
    "zero tokens": (edited("tokens: 2400", "tokens: 0"), ["train.tokens", "0"]),
    "a negative learning rate": (edited("1e-3", "-1e-3"), ["train.learning_rate"]),
    "a batch that is served without end": (
        edited("  batch_size: 1\n", "  batch_size: 9999999\n"), ["serving.batch_size", "less than or equal"],
    ),
    "drafts without end": (edited("[2, 4]", "[2, 100000]"), ["num_speculative_tokens", "less than or equal"]),
    "not a number": (edited("1e-3", ".nan"), ["train.learning_rate", "finite"]),
    "an infinity": (edited("top_p: 1.0", "top_p: .inf"), ["serving.top_p", "finite"]),
    "a share above one": (edited("top_p: 1.0", "top_p: 1.5"), ["serving.top_p", "1.5"]),
    "a share of zero": (edited("select: 0.15", "select: 0"), ["data.splits.select"]),
    "splits that leave nothing": (edited("test: 0.15", "test: 0.9"), ["data.splits", "below 1"]),
    "a negative temperature": (edited("[0.0, 1.0]", "[0.0, -1.0]"), ["sample.temperature", "0 or more"]),
    "no temperature": (edited("[0.0, 1.0]", "[]"), ["sample.temperature"]),
    "a served temperature that is not sampled": (edited("[0.0, 1.0]", "[1.0]"), ["sample.temperature"]),
    "tokens beyond any budget": (edited("tokens: 1200", "tokens: 1e30"), ["sample.tokens"]),
    "a whole number beyond any budget": (edited("tokens: 2400", "tokens: 9000000000000"), ["train.tokens"]),
    "more digits than a number has": (edited("seed: 1", f"seed: {'9' * 5000}"), ["cannot be read"]),
    "a number too large for a file": (edited("seed: 1", f"seed: {'9' * 30}"), ["seed", "too large"]),
    "samples without end": (edited("prompt: 1", "prompt: 1000000000"), ["sample.samples_per_prompt"]),
    "a batch without end": (edited("batch_size: 16", "batch_size: 1000000000"), ["sample.batch_size"]),
    "answers without end": (edited("tokens: 16", "tokens: 1000000000"), ["sample.max_new_tokens"]),
    "drafts of no tokens": (edited("[2, 4]", "[0]"), ["evaluate.num_speculative_tokens", "equal to 1"]),
    "the same draft length twice": (edited("[2, 4]", "[2, 2]"), ["distinct"]),
    "no draft length": (edited("[2, 4]", "[]"), ["evaluate.num_speculative_tokens"]),
    "one test prompt": (edited("prompts: 4", "prompts: 1"), ["evaluate.prompts"]),
    "layers in disorder": (edited("layers: [0, 3]", "layers: [3, 0]"), ["draft.init.layers", "ascending"]),
    "a layer twice": (edited("layers: [0, 3]", "layers: [0, 0]"), ["draft.init.layers", "once"]),
    "no layers": (edited("layers: [0, 3]", "layers: []"), ["draft.init.layers"]),
    "a layer that is no number": (edited("layers: [0, 3]", "layers: [a]"), ["draft.init.layers.0", "'a'"]),
    "a hub model without a commit": (edited("random:1", "org/name"), ["target.revision", "40 hex digits"]),
    "a branch for a commit": (
        edited("random:1", "org/name\n  revision: main"), ["target.revision", "40 hex digits"],
    ),
    "a commit of nothing": (edited("random:1", f"random:1\n  revision: {COMMIT}"), ["revision to null"]),
    "a sampling drafter from a hub": (
        edited("engine: builtin", "engine: builtin\n  drafter: org/name"), ["sample.drafter", "folder"],
    ),
    "no prompts": (edited("{source: builtin:structured, count: 160}", ""), ["data.prompts"]),
    "prompts of nowhere": (edited("builtin:structured", "builtin:none"), ["data.prompts.0", "builtin:NAME"]),
    "prompts by address": (
        edited("builtin:structured", "'https://host/x.jsonl'"), ["data.prompts.0.source", "file:PATH"],
    ),
    "a data set without a commit": (
        edited("builtin:structured", "'hub:org/set'"), ["data.prompts.0.source", "full commit hash"],
    ),
    "a count of zero": (edited("count: 160", "count: 0"), ["data.prompts.0.count"]),
    "an unknown export": (edited("formats: [hf]", "formats: [pickle]"), ["export.formats"]),
    "an endpoint for the builtin engine": (
        edited("engine: builtin", "engine: builtin\n  endpoint: {model: x}"), ["sample", "leave it out"],
    ),
    "an engine without its endpoint": (edited("engine: builtin", "engine: openai"), ["sample", "endpoint"]),
    "a password in an address": (
        edited("engine: builtin", "engine: openai\n  endpoint: {model: x, url: 'http://me:pw@host/v1'}"),
        ["sample.endpoint.url", "no secrets"],
    ),
    "an address of files": (
        edited("engine: builtin", "engine: openai\n  endpoint: {model: x, url: 'file:///etc/passwd'}"),
        ["sample.endpoint.url", "http://HOST"],
    ),
    "a token": (edited("dtype: float32", "hf_token: hf_abcdefgh12345678"), ["target.hf_token", "no secrets"]),
    "another name": (SMOKE + "name: ../../x\n", ["name", "unknown key"]),
    "a key twice": (SMOKE + "seed: 2\n", ["seed", "given twice", "keep one"]),
    "a section twice": (SMOKE + "train: {}\n", ["train", "given twice"]),
    "a bomb of aliases": (BOMB, ["anchors", "write the value out"]),
    "an alias": (edited("seed: 1", "seed: &s 1"), ["anchors"]),
    "a tag that runs code": (edited("seed: 1", "seed: !!python/object/apply:os.system [id]"), ["tags"]),
    "a merge key": (SMOKE + "<<: {a: 1}\n", ["plain word"]),
    "a key that is no word": (SMOKE + "1: 2\n", ["plain word"]),
    "deep nesting": ("a: " + "[" * 60_000, ["nested deeper"]),
    "a tab": (edited("  dtype", "\tdtype"), ["not valid YAML"]),
    "two documents": (SMOKE + "---\nseed: 1\n", ["not valid YAML"]),
    "a zero byte": (edited("seed: 1", "seed: \x00"), ["not valid YAML"]),
    "bytes that are no text": (b"\xff\xfe\x00seed: 1", ["UTF-8"]),
    "an empty file": ("", ["not a recipe"]),
    "plain text": ("please train a drafter\n", ["not a recipe"]),
    "a list": ("- target\n", ["not a recipe"]),
    "64 kB": (SMOKE + "# " + "x" * 70_000, ["64 kB"]),
}  # fmt: skip


@pytest.mark.parametrize("case", RECIPES_AND_WORDS)
def test_recipe(case: str, tmp_path: Path, refused: Callable[..., str]) -> None:
    text, words = RECIPES_AND_WORDS[case]
    message = refused("sample", mine(tmp_path, text))
    assert all(word in message for word in words), message
    assert "mine.yaml" in message, "where"
    assert "hf_abcdefgh12345678" not in message and "me:pw" not in message


COMMANDS: dict[str, tuple[list[str], list[str]]] = {
    "a recipe outside the folder": (["run", "../smoke"], ["may hold only"]),
    "an absolute name": (["run", "/etc/passwd"], ["may hold only"]),
    "an empty name": (["run", ""], ["may hold only"]),
    "a recipe with a line break": (["run", "smoke\n"], ["may hold only"]),
    "a name too long for a file": (["run", "x" * 300], ["name too long", "mend that"]),
    "a path too long for a file": (["show", "x" * 300 + ".yaml"], ["name too long", "mend that"]),
    "a folder of nobody's": (
        ["run", "smoke", "--set", "target.model=~nobody-at-all/x"], ["no folder ~nobody-at-all/x"],
    ),
    "a target too long for a file": (
        ["preflight", "smoke", "--set", f"target.model=/{'x' * 300}"], ["name too long", "mend that"],
    ),
    "an export too long for a folder": (["export", "smoke", "--out", "x" * 300], ["name too long"]),
    "a page too long for a file": (["compare", "--html", "x" * 300], ["name too long"]),
    "a file's name in no UTF-8": (["compare", "--html", "\udcff.html"], ["'\\udcff.html'", "UTF-8"]),
    "an unknown recipe": (["run", "smok"], ["did you mean smoke?"]),
    "a file that is not there": (["run", "none.yaml"], ["no recipe file none.yaml"]),
    "a folder for a recipe": (["run", "folder.yaml"], ["no recipe file"]),
    "a setting without a value": (["run", "smoke", "--set", "seed"], ["--set section.key=value"]),
    "a setting that is unknown": (["run", "smoke", "--set", "train.tokns=1"], ["did you mean tokens?"]),
    "a part of a number": (["run", "smoke", "--set", "seed.x=1"], ["has no parts"]),
    "a setting with a tag": (["run", "smoke", "--set", "seed=!!python/name:os.system x"], ["tags"]),
    "a setting that is half": (["run", "smoke", "--set", "seed=[1"], ["not valid YAML"]),
    "an option that is unknown": (["run", "smoke", "--fast"], ["--fast", "--help"]),
    "a command that is unknown": (["rum", "smoke"], ["invalid choice", "--help"]),
    "a requirement without a bound": (["evaluate", "smoke", "--require", "speedup"], ["speedup>=1.5"]),
    "a bound that is no number": (["evaluate", "smoke", "--require", "speedup>=1..5"], ["speedup>=1.5"]),
    "a measure that is none": (["evaluate", "smoke", "--require", "spedup>=1"], ["no measure", "speedup, "]),
    "processes of nowhere": (["train", "smoke", "--accelerate", "../ddp"], ["no processes", "ddp, fsdp2"]),
    "processes without end": (["train", "smoke", "--accelerate", "endless.yaml"], ["endless.yaml is no"]),
    "processes nested too deep": (["train", "smoke", "--accelerate", "deep.yaml"], ["deep.yaml is no"]),
    "an export of nothing": (["export", "models:/none/1"], ["--out DIR"]),
    "a target outside a package": (
        ["run", "smoke", "--set", "target.model=package:json/../x.gguf"], ["target", "json"],
    ),
    "a random target without a number": (
        ["sample", "smoke", "--set", "target.model=random:x"], ["target.model", "random:SEED"],
    ),
    "a drafter that was never shipped": (
        ["run", "smoke", "--set", "draft.init={from: shipped:none, layers: null}"], ["none", "is shipped"],
    ),
    "a champion of nothing": (
        ["run", "smoke", "--set", "draft.init={from: models:/none@champion, layers: null}"],
        ["models:/none@champion", "run the recipe that makes it first"],
    ),
    "a layer that the target lacks": (
        ["sample", "smoke", "--set", "draft.init.layers=[0, 99]"], ["draft.init.layers", "layers 0 to 3"],
    ),
    "more ids than the target has": (
        ["sample", "smoke", "--set", "draft.vocab_size=1000000"], ["draft.vocab_size", "384 ids"],
    ),
    "more positions than the target has": (
        ["sample", "smoke", "--set", "data.max_prompt_tokens=10000"], ["data.max_prompt_tokens", "lower"],
    ),
    "prompts that are all too long": (
        ["sample", "smoke", "--set", "data.max_prompt_tokens=2"], ["raise data.max_prompt_tokens"],
    ),
    "training that never ends": (
        ["train", "smoke", "--set", "train.tokens=100000000", "--set", "sample.tokens=100"],
        ["train.tokens", "raise sample.tokens"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", COMMANDS)
def test_command(
    case: str, tmp_path: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "endless.yaml").write_text("{num_processes: .inf, distributed_type: MULTI_GPU}")
    (tmp_path / "deep.yaml").write_text("[" * 2000)
    words, said = COMMANDS[case]
    message = refused(*words)
    assert all(word in message for word in said), message


# ---- prompts


def rows(*values: Any) -> bytes:
    return "".join(f"{value if isinstance(value, str) else json.dumps(value)}\n" for value in values).encode()


def prompts(count: int = 40) -> list[dict[str, str]]:
    words = "river stone cloud engine paper window garden letter winter silver market bridge".split()
    return [
        {"prompt": f"Say why {words[i % 12]} {i * i + 7} is a {words[(i * 5 + i // 12) % 12]}{i}."}
        for i in range(count)
    ]


USER = {"role": "user", "content": "Hello there"}
PROMPTS: dict[str, tuple[str, bytes, list[str]]] = {
    "an empty file": ("file", b"", ["is empty"]),
    "blank lines": ("file", b"\n \n\n", ["gives no prompts"]),
    "a line that is no JSON": ("file", rows({"prompt": "x"}, "{broken"), [":2: not JSON", "one JSON object"]),
    "a line cut off": ("file", rows({"prompt": "x"}) + b'{"prompt": "Tell me ab', [":2: not JSON"]),
    "a list of prompts": ("file", rows([{"prompt": "x"}]), [":1:", "JSON object, not list"]),
    "a spreadsheet": ("file", b"prompt,task\nhello,chat\n", [":1: not JSON"]),
    "wrong columns": ("file", rows({"text": "x"}), [":1:", '"prompt"', '"messages"']),
    "both columns": ("file", rows({"prompt": "x", "messages": [USER]}), [":1:", "either"]),
    "a number for a prompt": ("file", rows({"prompt": 3}), [":1:", "a text or a list"]),
    "a prompt of blanks": ("file", rows({"prompt": "  \t"}), [":1:", '"content"']),
    "no messages": ("file", rows({"messages": []}), [":1:", "not empty"]),
    "an unknown role": ("file", rows({"messages": [{"role": "wizard", "content": "x"}]}), [":1:", '"role"']),
    "a message of no text": ("file", rows({"messages": [{"role": "user"}]}), [":1:", '"content"']),
    "a message that is no object": ("file", rows({"messages": ["hello"]}), [":1:", '"role"']),
    "the assistant last": (
        "file", rows({"messages": [USER, {"role": "assistant", "content": "y"}]}), [":1:", "last message"],
    ),
    "a task that is no text": ("file", rows({"prompt": "x", "task": 3}), [":1:", '"task"']),
    "bytes that are no text": ("file", b'{"prompt": "\xff\xfe"}\n', ["cannot be read", "UTF-8"]),
    "UTF-16": ("file", json.dumps({"prompt": "x"}).encode("utf-16"), ["cannot be read", "UTF-8"]),
    "a gzip file": ("file", gzip.compress(b'{"prompt": "x"}'), ["cannot be read"]),
    "half a character": ("file", rows('{"prompt": "\\ud800 alone"}'), [":1:", "half of a character"]),
    "brackets without end": ("file", rows('{"prompt": ' + "[" * 100_000), [":1:"]),
    "digits without end": ("file", rows('{"prompt": ' + "9" * 5000 + "}"), [":1:", "cannot be read"]),
    "one line of 10 MB": ("file", rows({"prompt": "word " * 2_000_000}), ["1,000,000 characters: shorten"]),
    "a single prompt": ("file", rows({"prompt": "Hello"}), ["split", "add prompts"]),
    "copies alone": ("file", rows(*[{"prompt": "Tell me about rivers."}] * 50), ["split", "add prompts"]),
    "near copies alone": (
        "file",
        rows(*[{"prompt": f"Tell me of the long rivers of the old world{'!' * i}"} for i in range(12)]),
        ["split", "add prompts"],
    ),
    "too few prompts for the budget": ("file", rows(*prompts(40)), ["sample.tokens", "add prompts"]),
    "a Parquet file that is none": ("parquet", b"PAR1 not really", ["cannot be read", "Parquet"]),
    "a log of other things": ("log", rows({"event": "x"}, {"body": {"input": "x"}}), ["gives no prompts"]),
    "a log without a question": (
        "log", rows({"messages": [{"role": "system", "content": "Be brief."}]}), ["gives no prompts"],
    ),
    "a log that is no JSON": ("log", b"GET /v1/chat 200\n", [":1: not JSON"]),
    "Spec-Bench without turns": ("specbench", rows({"category": "qa"}), [":1:", '"turns"']),
}  # fmt: skip


@pytest.mark.parametrize("case", PROMPTS)
def test_prompts(case: str, tmp_path: Path, refused: Callable[..., str]) -> None:
    kind, content, words = PROMPTS[case]
    path = tmp_path / ("asked.parquet" if kind == "parquet" else "asked.jsonl")
    path.write_bytes(content)
    kind = "file" if kind == "parquet" else kind
    setting = f"data.prompts=[{{source: '{kind}:{path}'}}]"
    message = refused("sample", mine(tmp_path), "--set", setting, "--set", "sample.tokens=100000")
    assert all(word in message for word in words), message


def test_a_prompt_file_that_is_a_folder_or_missing(tmp_path: Path, refused: Callable[..., str]) -> None:
    for path in (tmp_path, tmp_path / "none.jsonl"):
        message = refused("sample", mine(tmp_path), "--set", f"data.prompts=['file:{path}']")
        assert f"no file {path}" in message


# ---- models

FEW = edited("builtin:structured, count: 160", "builtin:sql, count: 60").replace(
    "batch_size: 16", "batch_size: 4"
)


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


# ---- samples


def answers(requests: Path, **choice: Any) -> str:
    """A batch's answers to a file of requests, each with `choice` in place of a good one's."""
    lines = []
    for line in requests.read_text().splitlines():
        asked = json.loads(line)
        good = {"finish_reason": "stop", "token_ids": [40, 41, 2], "text": "ab", **choice}
        lines.append(json.dumps({"custom_id": asked["custom_id"], "response": {"body": {"choices": [good]}}}))
    return "\n".join(lines)


ANSWERS: dict[str, tuple[dict[str, Any] | str, list[str]]] = {
    "ids out of range": ({"token_ids": [40, 99999]}, ["outside the target's vocabulary of 384"]),
    "negative ids": ({"token_ids": [-1, 2]}, ["outside the target's vocabulary"]),
    "ids that are text": ({"token_ids": ["a"]}, ["no token id"]),
    "empty answers": ({"token_ids": [], "finish_reason": "length"}, ["0 tokens", "were asked for"]),
    "answers that are too long": ({"token_ids": [40] * 99, "finish_reason": "length"}, ["99 tokens"]),
    "text behind the end": ({"token_ids": [2, 40, 2]}, ["behind an end-of-sequence token"]),
    "answers that were filtered": ({"finish_reason": "content_filter"}, ["content_filter"]),
    "no file of answers": ("", ["run the requests in", "run the same command again"]),
    "another batch's answers": ('{"custom_id": "other", "response": {}}', ["another batch's"]),
    "answers that are no JSON": ("<html>busy</html>", [":1: not JSON"]),
    "answers that are a list": ("[1]", [":1:", "JSON object"]),
}  # fmt: skip


@pytest.mark.parametrize("case", ANSWERS)
def test_answers(case: str, tmp_path: Path, runs: Path, refused: Callable[..., str]) -> None:
    given, words = ANSWERS[case]
    path = mine(tmp_path, FEW.replace("engine: builtin", "engine: batch\n  endpoint: {model: x}"))
    settings = ["train.signal=live", f"seed={sorted(ANSWERS).index(case) + 100}"]
    command = ["sample", path, *(word for text in settings for word in ("--set", text))]
    message = refused(*command)
    (asked,) = [file for file in runs.glob("mine/*/batch/requests-1.jsonl") if str(file) in message]
    if given:
        text = given if isinstance(given, str) else answers(asked, **given)
        asked.with_name("answers-1.jsonl").write_text(text)
    message = refused(*command)
    assert all(word in message for word in words), message
