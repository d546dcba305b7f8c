"""Target and drafter for OpenVINO GenAI and for ONNX Runtime GenAI, written by the converters of those two.

What the converters pin is not what we need, so each runs in an environment of its own beside ours, which
`make openvino` and `make onnx` make. Weights stay as exact as the format allows: float32, or half precision
where they have no more.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data.errors import UserError
from data.files import write_json
from distill.export.card import model_card
from distill.export.directory import check_out_dir, write_export
from distill.export.gguf import lossless_type
from distill.export.hf import build_hf, write_texts
from distill.export.pair import check_pair, refused_by, vocabulary, vocabulary_hash
from distill.export.runtimes import NAMES, Runtime, interpreter
from distill.export.serve_parts import copied
from distill.redact import redacted


def export_genai(
    drafter_dir: Path,
    target: Path,
    out_dir: Path,
    runtime: Runtime,
    *,
    facts: Mapping[str, Any],
    calibration: Sequence[Sequence[int]] = (),
    force: bool = False,
) -> Path:
    """Write target and drafter for `runtime`; other arguments as `export_hf` has them.

    Raises `UserError` where the runtime's environment is missing, where its converter does not know the
    model, and where the two vocabularies differ.
    """
    out_dir = Path(out_dir).resolve()
    check_out_dir(out_dir, force)
    interpreter(runtime)
    with tempfile.TemporaryDirectory(prefix="distill-genai-") as scratch:
        folder = Path(scratch) / "hf"
        folder.mkdir()
        built = build_hf(drafter_dir, target, folder, facts, calibration)
        checks = check_pair(target, folder, out_dir)
        if (reason := refused_by(checks).get(runtime)) is not None:
            raise UserError(f"{NAMES[runtime]} would not speculate with this pair: {reason}.")

        def fill(out: Path) -> None:
            for name, source in (("target", target), ("draft", folder)):
                convert(source, out / name, runtime)
            # Its number of drafts a round; the converters do not keep all of it.
            generation = (folder / "generation_config.json").read_text("utf-8")
            (out / "draft" / "generation_config.json").write_text(generation, "utf-8")
            write_texts(out / "serve", copied(f"{runtime}_pair.py"))
            if runtime == "onnx":
                from distill.export.onnx_pair import join

                join(out)
            card = model_card(redacted(dict(facts)), built.expansion, out_dir.name, runtime)
            write_texts(out, {"README.md": card})

        notes = {
            "expansion": built.expansion,
            "checks": [asdict(check) for check in checks],
            "vocabulary": vocabulary_hash(vocabulary(target)),
        }
        write_export(out_dir, runtime, facts=facts, notes=notes, fill=fill, force=force)
    return out_dir


def convert(source: Path, out: Path, runtime: Runtime) -> None:
    """Write the Hugging Face model in `source` for `runtime` to the new folder `out`, by its own converter.

    `UserError` with the converter's last line where it fails.
    """
    exact = lossless_type(source) == "f32"
    python = interpreter(runtime)
    if runtime == "openvino":
        command = [str(python.with_name("optimum-cli")), "export", "openvino", "--model", str(source)]
        command += ["--task", "text-generation-with-past"]
        command += ["--weight-format", "fp32" if exact else "fp16", str(out)]
    else:
        command = [str(python), "-m", "onnxruntime_genai.models.builder", "-i", str(source), "-o", str(out)]
        command += ["-p", "fp32", "-e", "cpu"]
    with tempfile.TemporaryDirectory(prefix="distill-genai-") as scratch:
        command += ["-c", scratch] if runtime == "onnx" else []
        _run(command, f"{NAMES[runtime]}'s converter cannot convert {source}")


def decode(
    out_dir: Path, runtime: Runtime, prompts: Sequence[Sequence[int]], max_new_tokens: int, *, plain: bool
) -> list[dict[str, Any]]:
    """What the export's own script answers to token ids, greedily: {"tokens", "drafted", "accepted"} each."""
    with tempfile.TemporaryDirectory(prefix="distill-genai-") as scratch:
        ids = Path(scratch) / "ids.json"
        write_json(ids, [list(prompt) for prompt in prompts])
        command = [str(interpreter(runtime)), str(out_dir / "serve" / f"{runtime}_pair.py")]
        command += ["--ids", str(ids), "--max-tokens", str(max_new_tokens)]
        said = _run(command + ["--plain"] * plain, f"{NAMES[runtime]} does not serve {out_dir}")
    answers: list[dict[str, Any]] = json.loads(said)
    return answers


def _run(command: list[str], complaint: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise UserError(f"{complaint}: {lines[-1]}")
    return done.stdout
