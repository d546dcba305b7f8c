"""Export of a tuned drafter for other servers: one module per server family; light to import."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

Format = Literal["hf", "gguf", "compact"]
FORMATS: tuple[Format, ...] = get_args(Format)
"""For transformers, vLLM and SGLang; for llama.cpp; for this tool, to start other drafters from."""


class ExportConfig(BaseModel):
    """Which formats a recipe exports."""

    model_config = ConfigDict(extra="forbid")

    formats: list[Format] = Field(default=["hf"], min_length=1)
