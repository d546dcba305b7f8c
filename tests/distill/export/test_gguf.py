"""GGUF files that llama.cpp itself loads, speculates with, and answers from as without them."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.errors import UserError
from data.files import sha256_file
from distill.export.gguf import export_gguf, quantize_q4_0, raise_if_refused, served_type
from distill.export.llama_cpp import Race, complete, is_near_tie, race, serving
from distill.export.pair import check_gguf_pair
from distill.export.verify import _faults, predicted_acceptance, verdict, verify_gguf
from distill.models import save_drafter
from evaluation.decoder.drafters import DraftModel

FACTS: dict[str, Any] = {"target_model": "random:0", "num_speculative_tokens": 3}
slow = pytest.mark.slow  # 49,152 texts are read and written a dozen times
PROMPTS = [[10, 200, 3000, 40], [77, 78, 79], [5, 6, 7, 8, 9, 10]]


@pytest.fixture(scope="module")
def twin(
    make_model: Callable[..., Any], smollm2_target: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A drafter with the target's weights but for a little noise, which is often accepted, and its export."""
    import torch

    model = make_model(0, 2)
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter += 0.005 * torch.randn_like(parameter)
    folder = tmp_path_factory.mktemp("twin")
    save_drafter(DraftModel(model), folder / "drafter")
    export_gguf(folder / "drafter", smollm2_target, folder / "gguf", facts=FACTS)
    return folder / "drafter", folder / "gguf"


@slow
def test_the_directory_holds_every_type_and_a_manifest(twin: tuple[Path, Path]) -> None:
    out = twin[1]
    names = {path.name for path in out.iterdir()}
    assert {f"draft-{kind}.gguf" for kind in ("f32", "bf16", "q8_0", "q4_0")} <= names
    assert "target-f32.gguf" in names  # the target has no GGUF of its own
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["kind"] == "gguf"
    assert all(sha256_file(out / name) == digest for name, digest in manifest["files"].items())
    assert all(check["ok"] for check in manifest["checks"])
    assert sorted(path.name for path in (out / "serve").iterdir()) == [
        "ask.py",
        "llama-cpp.sh",
        "llama_cpp_server.py",
    ]


@slow
def test_q4_0_keeps_the_weights_to_its_precision(twin: tuple[Path, Path]) -> None:
    from gguf import GGUFReader
    from gguf.quants import dequantize

    exact, coarse = (
        {tensor.name: tensor for tensor in GGUFReader(twin[1] / f"draft-{kind}.gguf").tensors}
        for kind in ("f32", "q4_0")
    )
    assert exact.keys() == coarse.keys()
    packed = [name for name, tensor in coarse.items() if tensor.tensor_type.name == "Q4_0"]
    assert any("attn_q" in name for name in packed)
    for name in packed:
        wanted, found = (dequantize(side[name].data, side[name].tensor_type) for side in (exact, coarse))
        blocks = wanted.reshape(-1, 32)
        step = np.abs(blocks).max(axis=1, keepdims=True) / 8  # 16 levels from -8 to 7
        assert (np.abs(found.reshape(-1, 32) - blocks) <= 1.01 * step).all()


@slow
def test_the_drafters_type_follows_the_targets(twin: tuple[Path, Path]) -> None:
    assert served_type(twin[1] / "target-f32.gguf") == "q8_0"
    assert served_type(twin[1] / "draft-q4_0.gguf") == "q4_0"
    assert "draft-q8_0.gguf" in (twin[1] / "serve" / "llama-cpp.sh").read_text()


@slow
def test_llama_cpp_accepts_what_our_decoder_predicts_and_the_text_stays(
    twin: tuple[Path, Path], smollm2_target: Path
) -> None:
    drafter, out = twin
    proof = verify_gguf(
        out,
        drafter,
        smollm2_target,
        None,
        PROMPTS,
        num_speculative_tokens=3,
        max_new_tokens=32,
        eos_ids=(2,),
        seed=0,
    )
    assert proof["faults"] == []
    like = proof["races"]["like for like"]
    assert like["identical"] + like["near_ties"] == len(PROMPTS)
    assert (
        0.3 < proof["predicted_acceptance_rate"] < 1
    )  # some drafts are refused: the comparison says something
    assert like["drafted"] > 0
    assert like["acceptance_rate"] == pytest.approx(proof["predicted_acceptance_rate"], abs=0.03)


@slow
def test_a_foreign_drafter_changes_nothing_but_the_acceptance(
    twin: tuple[Path, Path], smollm2_target: Path, make_model: Callable[..., Any], tmp_path: Path
) -> None:
    """The negative control: the same proof on a drafter that knows nothing counts few accepted tokens."""
    save_drafter(DraftModel(make_model(9, 1)), tmp_path / "drafter")
    export_gguf(tmp_path / "drafter", smollm2_target, tmp_path / "gguf", facts=FACTS)
    found = race(twin[1] / "target-f32.gguf", tmp_path / "gguf" / "draft-f32.gguf", 3, PROMPTS, 16, seed=0)
    predicted = predicted_acceptance(tmp_path / "drafter", smollm2_target, PROMPTS, 3, 16, (2,))
    assert found.lossless and found.drafted > 0
    assert found.acceptance_rate == pytest.approx(predicted, abs=0.03) and found.acceptance_rate < 0.3


@slow
def test_without_its_type_the_drafter_does_nothing(twin: tuple[Path, Path]) -> None:
    """`-md` alone: what our scripts must not print."""
    script = twin[1] / "serve" / "llama_cpp_server.py"
    command = [sys.executable, str(script), "-m", str(twin[1] / "target-f32.gguf"), "--port", "0"]
    command += ["-md", str(twin[1] / "draft-f32.gguf")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        assert complete(url, PROMPTS[0], 8).drafted == 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


@slow
def test_a_text_that_parts_by_more_than_rounding_is_no_near_tie(twin: tuple[Path, Path]) -> None:
    with serving(twin[1] / "target-f32.gguf") as server:
        plain = complete(server.url, PROMPTS[0], 8).tokens
        assert not is_near_tie(server.url, PROMPTS[0], plain, [*plain[:4], plain[4] + 1, *plain[5:]])
        assert not is_near_tie(server.url, PROMPTS[0], plain, plain[:5])


@slow
def test_the_printed_commands_serve_ask_and_read_the_acceptance_back(twin: tuple[Path, Path]) -> None:
    from distill.export.command import commands

    start, ask = commands(twin[1], "gguf")
    assert start.endswith(" &")
    process = subprocess.Popen(
        start.removesuffix(" &") + " --port 0",
        shell=True,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        asked = subprocess.run(
            f"{ask} --url {url} --max-tokens 16 hello", shell=True, capture_output=True, text=True, check=True
        )
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(20)
    assert re.search(r"accepted \d+ of [1-9]\d* drafted tokens", asked.stdout)


def test_a_server_that_cannot_start_is_a_clear_error(tmp_path: Path, llama_cpp: None) -> None:
    (tmp_path / "x.gguf").write_bytes(b"no model")
    with pytest.raises(UserError, match=r"does not serve x\.gguf"), serving(tmp_path / "x.gguf"):
        pass


@slow
def test_a_pair_that_llama_cpp_would_not_speculate_with_is_refused(
    twin: tuple[Path, Path], tmp_path: Path
) -> None:
    from gguf import GGUFReader

    source = twin[1] / "draft-q8_0.gguf"
    raise_if_refused(check_gguf_pair(twin[1] / "target-f32.gguf", source))
    raw = bytearray(source.read_bytes())
    field = GGUFReader(source).fields["tokenizer.ggml.tokens"]
    text = bytes(field.parts[field.data[3000]])
    raw[raw.index(text)] ^= 1  # one token's text differs by a bit
    (tmp_path / "changed.gguf").write_bytes(raw)
    with pytest.raises(UserError, match="without speculation"):
        raise_if_refused(check_gguf_pair(twin[1] / "target-f32.gguf", tmp_path / "changed.gguf"))


def test_a_tokenizer_that_the_converter_does_not_know_is_a_clear_error(
    tmp_path: Path, llama_cpp: None
) -> None:
    from distill.tiny import make_tiny_pair

    target, family = make_tiny_pair(tmp_path, seed=1)
    with pytest.raises(UserError, match="cannot convert"):
        export_gguf(family, target, tmp_path / "out", facts=FACTS)
    assert not (tmp_path / "out").exists()


RACE = Race(
    prompts=10,
    identical=10,
    near_ties=0,
    tokens=400,
    drafted=500,
    accepted=200,
    plain_tokens_per_second=100.0,
    tokens_per_second=130.0,
    speedup={"mean": 1.3, "low": 1.2, "high": 1.4},
    round_cost=1.5,
    wide_cost=0.2,
)


FILES = {"target": "t.gguf", "draft": "d.gguf"}


def test_the_verdict_says_slower_where_it_is_and_why() -> None:
    assert "is faster" in verdict(RACE, FILES, 4)
    unsure = verdict(replace(RACE, speedup={"mean": 1.1, "low": 0.9, "high": 1.3}), FILES, 4)
    assert "not clearly faster" in unsure and "2.00 tokens" in unsure
    slower = verdict(replace(RACE, speedup={"mean": 0.7, "low": 0.6, "high": 0.8}, round_cost=2.9), FILES, 4)
    assert "is slower" in slower and "costs 2.90 plain steps" in slower and "Do not speculate" in slower


def test_faults_are_named() -> None:
    assert _faults("x", RACE) == []
    assert _faults("x", replace(RACE, drafted=0)) == ["x: llama.cpp did not speculate"]
    assert "1 of 10 texts differ" in _faults("x", replace(RACE, identical=8, near_ties=1))[0]


@slow
def test_quantising_twice_is_the_same(twin: tuple[Path, Path], tmp_path: Path) -> None:
    quantize_q4_0(twin[1] / "draft-f32.gguf", tmp_path / "again.gguf")
    assert sha256_file(tmp_path / "again.gguf") == sha256_file(twin[1] / "draft-q4_0.gguf")
