"""Target and drafter in OpenVINO GenAI: python openvino_pair.py [PROMPT].

Stands in the `serve` folder of an export and needs openvino-genai alone. Greedy: OpenVINO's check of sampled
drafts does not keep the target's distribution. Exits 1 where nothing was drafted.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import openvino
import openvino_genai

EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
"""For a comparison: else OpenVINO rounds to 16 and 8 bits where the processor can."""


def main() -> None:
    """Answer the prompt and say what was accepted; with --ids, answer token ids, as JSON."""
    parser = argparse.ArgumentParser(description="OpenVINO GenAI with a drafter; was speculation on?")
    parser.add_argument("prompt", nargs="*", default=["Write a JSON object that describes a book."])
    parser.add_argument("--models", type=Path, default=Path(__file__).resolve().parent.parent)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--plain", action="store_true", help="without the drafter")
    parser.add_argument("--ids", type=Path, help="JSON file with a list of lists of token ids")
    options = parser.parse_args()
    target, draft = options.models / "target", options.models / "draft"
    settings: dict[str, Any] = dict(EXACT) if options.ids else {}
    config = openvino_genai.GenerationConfig(str(target / "generation_config.json"))
    config.max_new_tokens, config.do_sample = options.max_tokens, False
    if not options.plain:
        settings["draft_model"] = openvino_genai.draft_model(draft, "CPU", **settings)
        tuned = json.loads((draft / "generation_config.json").read_text("utf-8"))
        config.num_assistant_tokens = tuned["num_assistant_tokens"]
    pipe = openvino_genai.LLMPipeline(target, "CPU", **settings)
    if options.ids:
        texts = json.loads(options.ids.read_text("utf-8"))
        answers = [pipe.generate(openvino.Tensor([ids]), config) for ids in texts]
        sys.stdout.write(json.dumps([{"tokens": each.tokens[0], **counts(each)} for each in answers]))
        return
    answer = pipe.generate([" ".join(options.prompt)], config)
    sys.stdout.write(answer.texts[0] + "\n")
    found = counts(answer)
    if not options.plain:
        sys.stdout.write(f"\naccepted {found['accepted']} of {found['drafted']} drafted tokens\n")
        sys.exit(0 if found["drafted"] else "OpenVINO did not speculate")


def counts(answer: Any) -> dict[str, int]:
    """Drafted and accepted tokens of one answer."""
    metrics = answer.extended_perf_metrics
    if metrics is None or not hasattr(metrics, "get_num_draft_tokens"):
        return {"drafted": 0, "accepted": 0}
    return {"drafted": metrics.get_num_draft_tokens(), "accepted": metrics.get_num_accepted_tokens()}


if __name__ == "__main__":
    main()
