"""Recipes and command lines that are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.bad_input.recipes import SMOKE, edited, mine

BOMB = "a: &a [x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [*{chr(97 + i)}, *{chr(97 + i)}]\n" for i in range(9)
)
COMMIT = "a" * 40

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
