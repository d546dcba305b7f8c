"""OpenVINO GenAI and ONNX Runtime GenAI load the exported pair, speculate with it, and answer as without."""

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data.errors import UserError
from distill.export import genai
from distill.export.command import check_request, commands
from distill.export.onnx_pair import join
from distill.export.runtimes import interpreter
from distill.export.verify import verify_genai
from distill.models import save_drafter
from evaluation.decoder.drafters import DraftModel

FACTS: dict[str, Any] = {"target_model": "org/target", "num_speculative_tokens": 3, "recipe": "r"}
PROMPTS = [[10, 200, 3000, 40], [77, 78, 79], [5, 6, 7, 8, 9, 10]]
slow = pytest.mark.slow  # converters take their time


@pytest.fixture(scope="module", params=["openvino", "onnx"])
def runtime(request: pytest.FixtureRequest) -> Any:
    try:
        interpreter(request.param)
    except UserError as missing:
        pytest.skip(str(missing))
    return request.param


def noisy(model: Any, much: float) -> DraftModel:
    """Its layers with noise: the less, the more is accepted."""
    import torch

    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter += much * torch.randn_like(parameter)
    return DraftModel(model)


@slow
def test_the_pair_speculates_as_predicted_and_the_text_stays(
    runtime: Any, make_model: Callable[..., Any], smollm2_target: Path, tmp_path: Path
) -> None:
    save_drafter(noisy(make_model(0, 2), 0.005), tmp_path / "drafter")
    out = genai.export_genai(tmp_path / "drafter", smollm2_target, tmp_path / "out", runtime, facts=FACTS)
    assert json.loads((out / "manifest.json").read_text())["kind"] == runtime
    settings: dict[str, Any] = {"num_speculative_tokens": 3, "max_new_tokens": 32, "eos_ids": (2,)}
    proof = verify_genai(out, runtime, tmp_path / "drafter", smollm2_target, PROMPTS, **settings)
    assert proof["faults"] == [] and proof["identical"] == len(PROMPTS) and proof["drafted"] > 0
    assert 0.3 < proof["predicted_acceptance_rate"] < 1  # the comparison says something
    # The negative control: a prediction for another drafter is not met.
    save_drafter(DraftModel(make_model(9, 1)), tmp_path / "foreign")
    other = verify_genai(out, runtime, tmp_path / "foreign", smollm2_target, PROMPTS, **settings)
    assert "our own decoder" in other["faults"][0]
    (line,) = commands(out, runtime)
    asked = subprocess.run(line, shell=True, capture_output=True, text=True, check=True)
    assert re.search(r"accepted \d+ of [1-9]\d* drafted tokens", asked.stdout)


def test_a_missing_environment_is_said_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    for name in ("openvino", "onnx"):
        with pytest.raises(UserError, match=f"make {name}"):
            check_request(name, tmp_path / "out", force=False, verify=True)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_a_converter_that_fails_is_named_with_its_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("openvino", "onnx"):
        programs = tmp_path / f".{name}" / "bin"
        programs.mkdir(parents=True)
        for program in ("python", "optimum-cli"):
            (programs / program).write_text("#!/bin/sh\necho 'no such architecture' >&2; exit 1\n")
            (programs / program).chmod(0o755)
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    for name in ("openvino", "onnx"):
        with pytest.raises(UserError, match=r"cannot convert .*: no such architecture"):
            genai.convert(tmp_path, tmp_path / "out", name)  # type: ignore[arg-type]


def test_one_config_names_both_models_and_the_drafts_a_round(tmp_path: Path) -> None:
    for name in ("target", "draft"):
        (tmp_path / name).mkdir()
        model = {"decoder": {"filename": "model.onnx", "head_size": len(name)}, "vocab_size": 7}
        (tmp_path / name / "genai_config.json").write_text(json.dumps({"model": model, "search": {}}))
        (tmp_path / name / "tokenizer.json").write_text(name)
    (tmp_path / "draft" / "generation_config.json").write_text('{"num_assistant_tokens": 20}')
    join(tmp_path)
    config = json.loads((tmp_path / "genai_config.json").read_text())
    assert config["model"]["decoder"] == {"filename": "target/model.onnx", "head_size": 6}
    assert config["model"]["draft"] == {"filename": "draft/model.onnx", "head_size": 5}
    assert config["speculative"] == {"max_draft_tokens": 16} and config["model"]["vocab_size"] == 7
    assert (tmp_path / "tokenizer.json").read_text() == "target"
