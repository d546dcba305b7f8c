"""`distill export CANDIDATE --out DIR`: a registered drafter with all that is known of it, written, and
proven where that is asked for.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from data.errors import UserError
from data.files import write_json
from distill.candidates import resolve_candidate
from distill.context import Run
from distill.export import FORMATS_OF_KIND, PROVEN_FORMATS, Format
from distill.export.record import candidate_record
from distill.recipe import Recipe
from distill.resolve import gguf_file
from distill.stages import Say

PROMPTS, TRANSFORMERS_PROMPTS, NEW_TOKENS = 10, 3, 48
"""A proof in llama.cpp and one in transformers ask this many test prompts, of known templates first, for at
most this many tokens each.
"""


@dataclass
class Source:
    """A registered drafter, its target and its workload. What is heavy is made on first use."""

    run: Run
    drafter: Path
    facts: dict[str, Any]

    @property
    def target_gguf(self) -> Path | None:
        return gguf_file(self.run.recipe.target.model)

    @cached_property
    def calibration(self) -> list[list[int]]:
        """Token ids of the workload: samples of the select split where they are on this machine, else
        prompts.
        """
        if self.run.stages["sample"].manifest() is not None:
            return [record.input_ids for record in self.run.samples.where(split="select")]
        return [ids for prompt, ids in self.run.prompts if prompt.split == "select"]

    @cached_property
    def test_prompts(self) -> list[list[int]]:
        """Token ids of test prompts, of known templates as far as they go."""
        test = [(prompt, ids) for prompt, ids in self.run.prompts if prompt.split == "test"]
        test.sort(key=lambda pair: not pair[0].seen_template)  # stable: known templates first
        return [ids for _, ids in test[:PROMPTS]]


def open_source(reference: str, runs_dir: Path, say: Say, stack: ExitStack) -> Source:
    """Find a candidate in MLflow: its files, its recipe and its measures. `UserError` where one is
    missing.
    """
    drafter = resolve_candidate(reference, runs_dir)
    record = candidate_record(drafter.name, runs_dir)
    recipe = Recipe.model_validate({"name": record.recipe_name, **record.recipe})
    facts = facts_of(recipe, record.evaluation, record.run_id)
    facts |= {"candidate": reference, "model_id": drafter.name}
    return Source(Run(recipe, runs_dir, say, stack), drafter, facts)


def facts_of(recipe: Recipe, evaluation: dict[str, Any], run_id: str) -> dict[str, Any]:
    """What an export says of where a drafter comes from, and the K that was tuned for it."""
    quantization = recipe.target.quantization
    return {
        "target_model": recipe.target.model,
        "target_revision": recipe.target.revision,
        **({} if quantization == "none" else {"target_quantization": quantization}),
        "recipe": recipe.name,
        "run_id": run_id,
        "num_speculative_tokens": evaluation["best"]["fixed_num_speculative_tokens"],
        "serving": evaluation["serving"],
        "evaluation": evaluation,
    }


def export(
    reference: str, kind: Format, out_dir: Path, runs_dir: Path, *, force: bool, verify: bool, say: Say
) -> dict[str, Any]:
    """Write candidate `reference` in format `kind` to `out_dir`, and prove it there where `verify`.

    Returns {"directory", "format", "verification" (None without `verify`), "commands"}. Raises `UserError`
    for what the user can mend: no such candidate, a directory in the way, a missing package.
    """
    from distill.preflight import require_tracking

    check_request(kind, out_dir, force=force, verify=verify)
    require_tracking()
    out_dir = out_dir.absolute()
    with ExitStack() as stack:
        source = open_source(reference, runs_dir, say, stack)
        check_kind(reference, source.run.recipe, kind)
        write(source, kind, out_dir, force=force)
        say(f"export: {source.facts['candidate']} as {kind} in {out_dir}")
        proof = None
        if verify:
            say("export: loading it again and decoding with it")
            proof = prove(source, kind, out_dir)
            write_json(out_dir / "verification.json", proof)
    return {
        "directory": str(out_dir),
        "format": kind,
        "verification": proof,
        "commands": commands(out_dir, kind),
    }


def check_request(kind: Format, out_dir: Path, *, force: bool, verify: bool) -> None:
    """`UserError` where `export` would refuse what is asked, whatever the drafter."""
    from distill.export.directory import check_out_dir
    from distill.export.runtimes import interpreter

    if verify and kind not in PROVEN_FORMATS:
        raise UserError(
            f"A server that loads {kind} exports cannot be asked here, so --verify has nothing to prove: "
            "leave it out."
        )
    check_out_dir(out_dir.absolute(), force, kind)
    if kind == "openvino" or kind == "onnx":
        interpreter(kind)


def check_kind(name: str, recipe: Recipe, kind: Format) -> None:
    """`UserError` where drafters of the recipe's kind are not exported in format `kind`."""
    drafter = recipe.draft.kind
    if kind not in FORMATS_OF_KIND[drafter]:
        fitting = " or ".join(FORMATS_OF_KIND[drafter])
        raise UserError(f"{name} is a drafter of kind {drafter}: export it with --format {fitting}.")


def write(source: Source, kind: Format, out_dir: Path, *, force: bool) -> None:
    """Write one format."""
    from distill.export.compact import export_compact
    from distill.export.genai import export_genai
    from distill.export.gguf import export_gguf
    from distill.export.heads import export_heads
    from distill.export.hf import export_hf

    common: dict[str, Any] = {"facts": source.facts, "force": force}
    pair = (source.drafter, source.run.target_folder, out_dir)
    if kind == "compact":
        export_compact(*pair, **common)
        return
    if kind == "medusa" or kind == "eagle" or kind == "speculators":
        export_heads(*pair, kind, **common)
        return
    common["calibration"] = source.calibration
    if kind == "openvino" or kind == "onnx":
        export_genai(*pair, kind, **common)
    else:
        exporter = {"hf": export_hf, "gguf": export_gguf}[kind]
        exporter(*pair, target_gguf=source.target_gguf, **common)


def prove(source: Source, kind: Format, out_dir: Path) -> dict[str, Any]:
    """What `verification.json` holds: the proof of one format, and its faults in sentences (none: proven)."""
    from distill.export.verify import same_logits, verify_genai, verify_gguf, verify_hf

    target = source.run.target_folder
    decoding: dict[str, Any] = {
        "num_speculative_tokens": int(source.facts["num_speculative_tokens"]),
        "max_new_tokens": NEW_TOKENS,
        "eos_ids": source.run.target.eos_ids,
    }
    if kind == "openvino" or kind == "onnx":
        return verify_genai(out_dir, kind, source.drafter, target, source.test_prompts, **decoding)
    if kind == "gguf":
        own, seed = source.target_gguf, source.run.recipe.seed
        return verify_gguf(out_dir, source.drafter, target, own, source.test_prompts, seed=seed, **decoding)
    texts = [source.run.target.tokenizer.decode(ids) for ids in source.test_prompts[:TRANSFORMERS_PROMPTS]]
    same = same_logits(out_dir, source.drafter, source.test_prompts)
    found = verify_hf(out_dir, target, texts, NEW_TOKENS)
    faults = [] if same else ["the exported drafter's logits are not the trained drafter's"]
    if found.identical < found.prompts:
        different = found.prompts - found.identical
        faults.append(f"transformers: {different} of {found.prompts} texts differ from plain decoding")
    if found.tokens_per_target_call <= 1:
        faults.append("transformers accepted no drafted token")
    return {"same_logits": same, **asdict(found), "faults": faults}


def commands(out_dir: Path, kind: Format) -> list[str]:
    """The shell lines that serve the export and read the acceptance back, for what is installed here; none
    where nothing here can.

    The scripts for llama.cpp look for llama-server, else for the wheel xllamacpp in the Python that comes
    first on the path: ours, where that has it.
    """
    serve = out_dir / "serve"
    if kind == "openvino" or kind == "onnx":
        from distill.export.runtimes import interpreter

        return [shlex.join([str(interpreter(kind)), str(serve / f"{kind}_pair.py")])]
    if not (serve / "llama-cpp.sh").is_file():
        return []
    prefix = (
        "" if shutil.which("llama-server") else f"PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH "
    )
    ask = f"{shlex.quote(sys.executable)} {shlex.quote(str(serve / 'ask.py'))}"
    return [f"{prefix}sh {shlex.quote(str(serve / 'llama-cpp.sh'))} &", ask]


def report(answer: dict[str, Any]) -> str:
    """What `export` did, in lines for the terminal."""
    lines = [f"Exported to {answer['directory']}"]
    if (proof := answer["verification"]) is not None:
        lines += [f"NOT PROVEN, {fault}" for fault in proof["faults"]] or ["Proven: see verification.json"]
        lines += [
            f"  {name}: accepted {run['accepted']} of {run['drafted']} drafted tokens "
            f"({run['acceptance_rate']:.3f}), {run['identical']} of {run['prompts']} texts are plain "
            f"decoding's, {run['near_ties']} near ties, {run['speedup']['mean']:.2f}x "
            f"[{run['speedup']['low']:.2f}, {run['speedup']['high']:.2f}] "
            f"({run['plain_tokens_per_second']:.1f} -> {run['tokens_per_second']:.1f} tokens/s)"
            for name, run in proof.get("races", {}).items()
        ]
        lines += [proof["verdict"]] if "verdict" in proof else []
        if "accepted" in proof:
            lines.append(
                f"  accepted {proof['accepted']} of {proof['drafted']} drafted tokens ("
                f"{proof['acceptance_rate']:.3f}; our own decoder {proof['predicted_acceptance_rate']:.3f}), "
                f"{proof['identical']} of {proof['prompts']} texts are plain decoding's"
            )
    if answer["commands"]:
        lines += ["Serve it, ask it, and read the acceptance back:", *answer["commands"]]
    return "\n".join(lines)
