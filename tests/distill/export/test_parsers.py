"""vLLM and SGLang read what is exported: their own configuration classes, without a GPU.

`make parsers` puts their modules into an environment of its own, over our torch; what they depend on besides
is left out, so they parse and check, and serve nothing.
"""

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from data.errors import UserError
from distill.export.heads import export_heads
from distill.export.hf import export_hf
from distill.models import save_drafter
from evaluation.decoder.drafters import DraftModel
from evaluation.decoder.eagle import start_eagle

pytestmark = pytest.mark.slow
PYTHON = Path(sys.prefix) / ".parsers" / "bin" / "python"
STEPS = 3  # that an EAGLE layer drafts
FACTS: dict[str, Any] = {
    "target_model": "org/target",
    "num_speculative_tokens": 3,
    "recipe": "r",
    "evaluation": {
        "decode": [
            {
                "drafter": "model",
                "split": "seen",
                "batch_size": size,
                "num_speculative_tokens": 3,
                "speedup": {"mean": mean},
                "unconditional_acceptance": [0.8, 0.5, 0.55],
                "tokens_per_target_call": {"mean": 2.0},
                "prompts": 9,
            }
            for size, mean in ((1, 1.5), (8, 0.9))
        ]
    },
}

VLLM = """
import json, sys
from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig

target, gpus, *texts = sys.argv[1:]
model = ModelConfig(model=target, tokenizer=target, dtype="float32")
for text in texts:
    try:
        parallel = ParallelConfig(tensor_parallel_size=int(gpus))
        found = SpeculativeConfig(
            target_model_config=model, target_parallel_config=parallel, **json.loads(text)
        )
        draft = found.draft_model_config
        print("READ", json.dumps({
            "method": found.method,
            "architecture": draft.architectures[0],
            "k": found.num_speculative_tokens,
            "vocabulary": draft.get_vocab_size(),
            "rates": found.synthetic_acceptance_rates,
            "schedule": found.num_speculative_tokens_per_batch_size,
            "layers": getattr(draft.hf_config, "eagle_aux_hidden_state_layer_ids", None),
        }))
    except ValueError as error:
        print("READ", json.dumps({"refused": str(error)}))
"""


def ask(code: str, *words: str) -> list[Any]:
    """What `code` prints behind READ, in the environment of the parsers."""
    if not PYTHON.is_file():
        pytest.skip("the modules of vLLM and SGLang are not here: `make parsers`")
    ours = {"PYTHONPATH": sysconfig.get_path("purelib"), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [str(PYTHON), "-c", code, *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **ours},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("READ ")]


@pytest.fixture(scope="module")
def exported(
    make_model: Callable[..., Any], smollm2_target: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A plain drafter with a reduced head, exported."""
    folder = tmp_path_factory.mktemp("plain")
    model, vocab = make_model(1, 1), torch.arange(0, 49152, 6)
    head = torch.nn.Linear(64, len(vocab), bias=False)
    head.weight.data.copy_(model.lm_head.weight.data[vocab])
    model.lm_head, model.config.tie_word_embeddings = head, False
    save_drafter(DraftModel(model, vocab), folder / "own")
    return export_hf(folder / "own", smollm2_target, folder / "hf", facts=FACTS)


@pytest.fixture(scope="module")
def eagle(
    make_model: Callable[..., Any], smollm2_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A folder with an EAGLE layer and its target: own/, eagle/, speculators/ and target/."""
    folder, vocab = tmp_path_factory.mktemp("layer"), torch.arange(0, 49152, 6)
    target = make_model(0, 4)
    target.save_pretrained(folder / "target")
    for file in smollm2_tokenizer.iterdir():
        (folder / "target" / file.name).write_bytes(file.read_bytes())
    torch.manual_seed(3)
    model = start_eagle(target, vocab, STEPS)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.randn_like(weight)
    model.config.dtype = torch.float32
    save_drafter(DraftModel(model, vocab), folder / "own")
    facts = {**FACTS, "target_model": str(folder / "target")}
    for kind in ("eagle", "speculators"):
        export_heads(folder / "own", folder / "target", folder / kind, kind, facts=facts)  # type: ignore[arg-type]
    return folder


def test_vllm_takes_the_plain_drafter_and_its_synthetic_twin(exported: Path, smollm2_target: Path) -> None:
    texts = []
    for name in ("vllm.json", "vllm-synthetic.json"):
        config = json.loads((exported / "serve" / name).read_text())
        texts.append({**config, "model": str(exported)})
    plain, synthetic = ask(VLLM, str(smollm2_target), "1", *map(json.dumps, texts))
    assert (plain["method"], plain["k"], plain["vocabulary"]) == ("draft_model", 3, 49152)
    assert plain["schedule"] == [[1, 1, 3], [2, 8, 0]]
    assert synthetic["rates"] == [0.8, 0.5, 0.5]


def test_vllm_refuses_what_our_own_checks_refuse(
    exported: Path, smollm2_target: Path, tmp_path: Path
) -> None:
    """Negative controls: they keep the tests above from passing on a parser that takes anything."""
    config = {**json.loads((exported / "serve" / "vllm.json").read_text()), "model": str(exported)}
    other, named = tmp_path / "other", tmp_path / "eagle3"
    for folder in (other, named):
        folder.mkdir()
        for file in exported.iterdir():
            if file.is_file():
                (folder / file.name).write_bytes(file.read_bytes())
    short = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**short, "vocab_size": 49000}))
    rising = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.5, 0.6, 0.1]}
    found = ask(
        VLLM,
        str(smollm2_target),
        "1",
        *(
            json.dumps({**config, **change})
            for change in ({"model": str(other)}, {"model": str(named)}, rising)
        ),
    )
    assert "same vocabulary size" in found[0]["refused"]
    assert found[1]["method"] == "eagle3"  # misread by its name: why our export refuses such a path
    with pytest.raises(UserError, match="eagle3"):
        export_hf(exported, smollm2_target, named, facts=FACTS)
    assert "non-increasing" in found[2]["refused"]


def test_vllm_takes_the_eagle_layer_in_both_layouts(eagle: Path) -> None:
    texts = [
        {**json.loads((eagle / "eagle" / "serve" / "vllm.json").read_text()), "model": str(eagle / kind)}
        for kind in ("eagle", "speculators")
    ]
    for found in ask(VLLM, str(eagle / "target"), "1", *map(json.dumps, texts)):
        assert found["method"] == "eagle3" and "Eagle3" in found["architecture"]
        assert found["layers"] == [1, 2, 3]


SGLANG = """
import json, sys
from sglang.srt.server_args import prepare_server_args
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

found = prepare_server_args(sys.argv[1:])
assert SpeculativeAlgorithm.from_string(found.speculative_algorithm).is_standalone()  # read when it starts
names = ("algorithm", "draft_model_path", "num_steps", "eagle_topk", "num_draft_tokens", "token_map")
print("READ", json.dumps({name: getattr(found, f"speculative_{name}") for name in names}))
"""


def test_sglang_takes_the_line_that_starts_it(exported: Path, smollm2_target: Path, tmp_path: Path) -> None:
    fake = tmp_path / "bin" / "python3"
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    fake.chmod(0o755)
    script = ["sh", str(exported / "serve" / "sglang.sh"), "--device", "cpu"]
    started = {**os.environ, "PATH": f"{fake.parent}:/usr/bin:/bin", "TARGET": str(smollm2_target)}
    said = subprocess.run(script, env=started, capture_output=True, text=True, check=True)
    words = said.stdout.splitlines()
    assert words[:2] == ["-m", "sglang.launch_server"]
    (found,) = ask(SGLANG, *words[2:])
    assert found["algorithm"] == "STANDALONE" and found["draft_model_path"] == str(exported)
    assert (found["num_steps"], found["eagle_topk"], found["num_draft_tokens"]) == (3, 1, 4)
    wrong = {"STANDALONE": "STANDALON", "--speculative-eagle-topk": "--speculative-topk"}
    for right, said_instead in wrong.items():  # negative controls
        with pytest.raises(AssertionError, match=f"{said_instead}\\b"):
            ask(SGLANG, *(said_instead if word == right else word for word in words[2:]))
