"""Target and drafter in ONNX Runtime GenAI: python onnx_pair.py [PROMPT].

Stands in the `serve` folder of an export and needs onnxruntime-genai alone. Exits 1 where nothing was
drafted.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

CONFIG = "genai_config.json"
MOST_DRAFTS = 16  # its own limit


def main() -> None:
    """Answer the prompt and say what was accepted; with --ids, answer token ids, as JSON."""
    parser = argparse.ArgumentParser(description="ONNX Runtime GenAI with a drafter; was speculation on?")
    parser.add_argument("prompt", nargs="*", default=["Write a JSON object that describes a book."])
    parser.add_argument("--models", type=Path, default=Path(__file__).resolve().parent.parent)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--plain", action="store_true", help="without the drafter")
    parser.add_argument("--ids", type=Path, help="JSON file with a list of lists of token ids")
    options = parser.parse_args()
    if not (options.models / CONFIG).is_file():
        join(options.models)
    import onnxruntime_genai

    model = onnxruntime_genai.Model(str(options.models / "target" if options.plain else options.models))
    if options.ids:
        texts = json.loads(options.ids.read_text("utf-8"))
        sys.stdout.write(json.dumps([answer(model, ids, options.max_tokens) for ids in texts]))
        return
    tokenizer = onnxruntime_genai.Tokenizer(model)
    messages = json.dumps([{"role": "user", "content": " ".join(options.prompt)}])
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    found = answer(model, tokenizer.encode(prompt).tolist(), options.max_tokens)
    sys.stdout.write(tokenizer.decode(found["tokens"]) + "\n")
    if not options.plain:
        sys.stdout.write(f"\naccepted {found['accepted']} of {found['drafted']} drafted tokens\n")
        sys.exit(0 if found["drafted"] else "ONNX Runtime GenAI did not speculate")


def answer(model: Any, ids: list[int], max_tokens: int) -> dict[str, Any]:
    """Greedy tokens behind `ids`, and how many were drafted and accepted."""
    import onnxruntime_genai

    params = onnxruntime_genai.GeneratorParams(model)
    params.set_search_options(do_sample=False, max_length=len(ids) + max_tokens)
    generator = onnxruntime_genai.Generator(model, params)
    generator.append_tokens([ids])
    while not generator.is_done():
        generator.generate_next_token()
    stats = generator.get_speculative_stats() if hasattr(generator, "get_speculative_stats") else {}
    return {
        "tokens": [int(token) for token in generator.get_sequence(0)[len(ids) :]],
        "drafted": stats.get("draft_tokens_proposed", 0),
        "accepted": stats.get("draft_tokens_accepted", 0),
    }


def join(models: Path) -> None:
    """Make one model of `models`/target and `models`/draft, as their own converter wrote them: a config that
    names both, and the tokenizer.
    """
    whole, drafter = (json.loads((models / name / CONFIG).read_text("utf-8")) for name in ("target", "draft"))
    tuned = json.loads((models / "draft" / "generation_config.json").read_text("utf-8"))
    sides = (("target", whole["model"]["decoder"]), ("draft", drafter["model"]["decoder"]))
    for name, decoder in sides:
        decoder["filename"] = f"{name}/{decoder['filename']}"
    whole["model"]["draft"] = drafter["model"]["decoder"]
    whole["speculative"] = {"max_draft_tokens": min(MOST_DRAFTS, tuned["num_assistant_tokens"])}
    for file in (models / "target").iterdir():
        if file.suffix in (".json", ".jinja", ".model", ".txt") and file.name != CONFIG:
            shutil.copyfile(file, models / file.name)
    (models / CONFIG).write_text(json.dumps(whole, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
