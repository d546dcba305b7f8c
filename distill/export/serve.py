"""Ready command lines: the target with the exported drafter in each server, and why not where it cannot be.

The scripts find the drafter by their own place, so the exported directory may be moved; `TARGET` in the
environment overrides the target. Options are those that the servers document; `vllm.json` and the like are
plain data for other launchers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distill.export.serve_llama_cpp import converted_files
from distill.export.serve_parts import as_json, copied, listed, samples_draft, script

NEVER = {
    "tgi": "it takes no separate draft model, only Medusa heads and n-gram look-up.",
    "speculators": "it has no type for a plain draft model, only for heads that read the target's states.",
}
"""Servers and formats that cannot take any plain drafter, with the reason."""

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

_VLLM_VERSIONS = {
    "draft_model": "plain draft models: 0.25 or later",
    "eagle3": "0.25 and 0.33 read its config",
    "medusa": "0.25 has Medusa, 0.33 no longer",
}

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

_OPENVINO = """# Needs `pip install 'optimum-intel[openvino]' openvino-genai` in an environment of its own.
MADE=${{OPENVINO_DIR:-$DRAFT/openvino}}
for pair in "$TARGET=target" "$DRAFT=draft"; do
  [ -e "$MADE/${{pair##*=}}" ] || optimum-cli export openvino --model "${{pair%=*}}" \\
    --task text-generation-with-past --weight-format int8 "$MADE/${{pair##*=}}"
done
cp "$DRAFT/generation_config.json" "$MADE/draft/" # the number of drafts a round
exec python3 "$HERE/openvino_pair.py" --models "$MADE" "$@"
"""

_ONNX = """# Needs `pip install onnxruntime-genai onnx-ir torch transformers` in an environment of its own.
MADE=${{ONNX_DIR:-$DRAFT/onnx}}
for pair in "$TARGET=target" "$DRAFT=draft"; do
  [ -d "${{pair%=*}}" ] && from=-i || from=-m # a hub id is read from the hub
  [ -e "$MADE/${{pair##*=}}" ] || python3 -m onnxruntime_genai.models.builder "$from" "${{pair%=*}}" \\
    -o "$MADE/${{pair##*=}}" -p int4 -e cpu -c "$MADE/cache"
done
cp "$DRAFT/generation_config.json" "$MADE/draft/" # the number of drafts a round
exec python3 "$HERE/onnx_pair.py" --models "$MADE" "$@"
"""

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
    files = {
        "vllm": vllm_files(facts, target, tensor_parallel, "draft_model"),
        "sglang": {"sglang.sh": script("SGLang with the drafter.", target, _sglang(steps, token_map))},
        "tensorrt-llm": {
            "tensorrt-llm.sh": script(
                "TensorRT-LLM with the drafter.", target, _TENSORRT_LLM.format(steps=steps)
            )
        },
        "llama.cpp": converted_files(facts, target, dtype, target_gguf),
        "openvino": {
            "openvino.sh": script("OpenVINO GenAI with the drafter, greedy.", target, _OPENVINO.format()),
            **copied("openvino_pair.py"),
        },
        "onnx": {
            "onnx.sh": script("ONNX Runtime GenAI with the drafter.", target, _ONNX.format()),
            **copied("onnx_pair.py"),
        },
        "transformers": {
            "transformers_example.py": _TRANSFORMERS.format(
                target=repr(target), sampling=transformers_sampling(serving)
            )
        },
    }
    return listed(files, reasons)


def vllm_files(
    facts: Mapping[str, Any], target: str, tensor_parallel: Sequence[int], method: str
) -> dict[str, str]:
    """vLLM's configs and the script that passes one; `method` is its name for the kind of drafter."""
    return {
        "vllm.json": as_json(vllm_config(facts, method)),
        **_synthetic(facts, method),
        "vllm.sh": script(
            f"vLLM with the drafter ({_VLLM_VERSIONS[method]}).",
            target,
            _VLLM.format(sizes=" or ".join(map(str, tensor_parallel))),
        ),
    }


def vllm_config(facts: Mapping[str, Any], method: str = "draft_model") -> dict[str, Any]:
    """vLLM's `--speculative-config` without the drafter's place.

    A sampled draft is only right where the recipe serves so: vLLM's default drafts greedily. The best K per
    batch size stands in it where several batch sizes were measured.
    """
    config: dict[str, Any] = {
        "method": method,
        "model": "DRAFT_DIR",
        "num_speculative_tokens": int(facts["num_speculative_tokens"]),
        "draft_tensor_parallel_size": 1,
    }
    if samples_draft(facts.get("serving") or {}):
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
    top_p = float(serving.get("top_p", 1.0))
    return f"do_sample=True, temperature={temperature:g}, top_p={top_p:g}, top_k=0"  # its default is 50


def _synthetic(facts: Mapping[str, Any], method: str) -> dict[str, str]:
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
        **vllm_config({"num_speculative_tokens": steps}, method),
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": rates,
    }
    return {"vllm-synthetic.json": as_json(config)}


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
