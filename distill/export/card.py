"""The model card of an exported drafter: what it is, what was measured, how to serve it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from distill.export import Format
from evaluation.measures import headline_acceptance, headline_split, machine_label, serving_label, split_label

_SERVE = {
    "hf": [
        "`serve/` holds ready scripts for vLLM (`sh serve/vllm.sh`), SGLang, TensorRT-LLM, llama.cpp, "
        "OpenVINO GenAI, ONNX Runtime GenAI and transformers; `serve/servers.json` lists them, and says of a "
        "server that is missing why. In transformers:",
        "",
        "```python",
        'draft = AutoModelForCausalLM.from_pretrained("THIS DIRECTORY", dtype=target.dtype)',
        "target.generate(**inputs, assistant_model=draft)",
        "```",
    ],
    "gguf": [
        "```sh",
        "sh serve/llama-cpp.sh    # llama.cpp's server with target and drafter, on http://127.0.0.1:8080",
        "python3 serve/ask.py     # ask it, and read the acceptance back",
        "```",
    ],
    "openvino": [
        "Target and drafter for OpenVINO GenAI stand in `target/` and `draft/`:",
        "",
        "```sh",
        "python3 serve/openvino_pair.py    # with openvino-genai; says what was accepted",
        "```",
    ],
    "onnx": [
        "Target and drafter for ONNX Runtime GenAI stand in `target/` and `draft/`, and `genai_config.json` "
        "names both:",
        "",
        "```sh",
        "python3 serve/onnx_pair.py    # with onnxruntime-genai; says what was accepted",
        "```",
    ],
    "compact": [
        "Not for servers: layers and head in 8 bits, without the target's embeddings. A recipe starts from "
        "it by `draft: {init: {from: THIS DIRECTORY}}`, or `shipped:NAME` where it stands in "
        "`recipes/drafters/NAME`, and exports what it makes of it.",
    ],
}


_LIBRARIES = {
    "hf": "transformers",
    "gguf": "gguf",
    "openvino": "openvino",
    "onnx": "onnx",
    "compact": "draft-distill",
}


def model_card(facts: Mapping[str, Any], expansion: Mapping[str, Any], name: str, kind: Format = "hf") -> str:
    """README.md with the hub's metadata on top. Every number carries its sample size, and the machine is
    named.
    """
    target, rows = str(facts["target_model"]), expansion["rows"]
    lines = ["---"]
    if facts.get("license"):
        lines.append(f"license: {json.dumps(str(facts['license']))}")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", target):
        lines.append(f"base_model: {json.dumps(target)}")
    lines += [
        f"library_name: {_LIBRARIES[kind]}",
        "pipeline_tag: text-generation",
        "tags: [speculative-decoding, draft-model]",
        "---",
        "",
        f"# Draft model {_plain(facts.get('recipe') or name)}",
        "",
        f"A draft model for speculative decoding of `{_plain(target)}`"
        + (f" at revision `{_plain(facts['target_revision'])}`" if facts.get("target_revision") else "")
        + (f", quantised to {facts['target_quantization']}" if facts.get("target_quantization") else "")
        + ". It is of no use alone: the target checks every token it proposes, so the text is the target's.",
        "",
        f"- Tuned number of speculative tokens: **{facts['num_speculative_tokens']}**",
    ]
    for key, said in (("recipe", "Recipe"), ("candidate", "Candidate"), ("run_id", "MLflow run")):
        if facts.get(key):
            lines.append(f"- {said}: `{_plain(facts[key])}`")
    if expansion["filled"]:
        lines.append(
            f"- Vocabulary: drafts {rows:,} of {rows + expansion['filled']:,} ids. The other head rows are "
            f"filled so that they are never drafted greedily (counted: {expansion['greedy_missing']} of "
            f"{expansion['positions']:,} positions); drafting by sampling loses a fraction of "
            f"{expansion['missing_mass']:.1g} of its probability to them. The full head also makes a draft "
            "step dearer than where the reduced head was measured."
        )
    evaluation = facts.get("evaluation")
    if evaluation:
        lines += ["", "## Measured", "", *_measures(evaluation)]
    lines += ["", "## Serve", "", *_SERVE[kind]]
    return "\n".join(lines) + "\n"


def _measures(evaluation: Mapping[str, Any]) -> list[str]:
    serving, machine = evaluation.get("serving") or {}, evaluation.get("machine") or {}
    lines = [
        f"On {_plain(machine_label(machine))}; served at {serving_label(serving)}; 95 % intervals.",
        "",
    ]
    split = headline_split(evaluation)
    for measure in ("sampled", "argmax", "greedy"):
        found = headline_acceptance(evaluation.get("acceptance") or [], measure, serving, split)
        if found:
            where = f"{split_label(evaluation, split)}, temperature {found['temperature']:g}"
            lines.append(f"- `acceptance/{measure}` ({where}): {_interval(found, 3)}")
    lines += [
        "",
        "| prompts | K | tokens per target call | speedup over plain | number of prompts |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in evaluation.get("decode") or []:
        if row.get("drafter") in ("model", "adaptive"):
            upper = "up to " if row["drafter"] == "adaptive" else ""
            cells = (
                split_label(evaluation, row["split"]),
                f"{upper}{row['num_speculative_tokens']}",
                _interval(row["tokens_per_target_call"], 2),
                _interval(row["speedup"], 2),
                row["prompts"],
            )
            lines.append(f"| {' | '.join(str(cell) for cell in cells)} |")
    verdict = (evaluation.get("best") or {}).get("verdict")
    return [*lines, "", _plain(verdict.replace(" -> ", " to "))] if verdict else lines


def _interval(value: Mapping[str, float], digits: int) -> str:
    text = f"{value['mean']:.{digits}f}"
    if value.get("low") is not None and value.get("high") is not None:
        text += f" [{value['low']:.{digits}f}, {value['high']:.{digits}f}]"
    return text


def _plain(text: Any) -> str:
    """One line without the characters that markdown or HTML would act on."""
    return re.sub(r"[`<>|\\\r\n]", " ", str(text)).strip()
