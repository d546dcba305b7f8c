"""Export of a tuned drafter for other servers: one module per server family; light to import."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

Format = Literal["hf", "gguf", "openvino", "onnx", "compact", "medusa", "eagle", "speculators"]
FORMATS: tuple[Format, ...] = get_args(Format)
"""For transformers, vLLM and SGLang; for llama.cpp; for OpenVINO GenAI and ONNX Runtime GenAI; for this tool,
to start other drafters from; Medusa's and EAGLE-3's public checkpoints, and EAGLE-3's as speculators writes
it, for the servers that load them.
"""
PROVEN_FORMATS: tuple[Format, ...] = ("hf", "gguf", "openvino", "onnx")
"""Those that `--verify` loads and decodes with."""
FORMATS_OF_KIND: dict[str, tuple[Format, ...]] = {
    "model": ("hf", "gguf", "openvino", "onnx", "compact"),
    "medusa": ("medusa",),
    "eagle": ("eagle", "speculators"),
}
"""The formats for each kind of drafter (`draft.kind`)."""


class ExportConfig(BaseModel):
    """Which formats a recipe exports."""

    model_config = ConfigDict(extra="forbid")

    formats: list[Format] = Field(default=["hf"], min_length=1)
