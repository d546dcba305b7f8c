"""The environments of runtimes whose pins clash with ours; light to import."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

from data.errors import UserError

Runtime = Literal["openvino", "onnx"]
NAMES: dict[Runtime, str] = {"openvino": "OpenVINO GenAI", "onnx": "ONNX Runtime GenAI"}


def interpreter(runtime: Runtime) -> Path:
    """The Python of the runtime's environment; `UserError` where there is none."""
    python = Path(sys.prefix) / f".{runtime}" / "bin" / "python"
    if not python.is_file():
        raise UserError(
            f"{NAMES[runtime]} is needed, in an environment of its own: `make {runtime}` makes it."
        )
    return python
