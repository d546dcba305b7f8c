"""Export of a tuned drafter for other servers: one module per server family; light to import."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class ExportConfig(BaseModel):
    """Which formats a recipe exports."""

    model_config = ConfigDict(extra="forbid")

    formats: list[Literal["hf"]] = Field(default=["hf"], min_length=1)


@dataclass(frozen=True)
class Verification:
    """Assisted against plain greedy decoding in transformers, float32."""

    prompts: int
    identical: int
    """Prompts whose tokens are the same; fewer than `prompts` means a broken export or a near tie."""
    tokens: int
    target_calls: int
    """Forward passes of the target that made those tokens, prompts included."""

    @property
    def tokens_per_target_call(self) -> float:
        """Above 1 only where drafted tokens were accepted."""
        return self.tokens / self.target_calls

    @property
    def ok(self) -> bool:
        return self.identical == self.prompts and self.tokens > self.target_calls


def verify_hf(
    out_dir: Path, target_dir: Path, prompts: Sequence[str], max_new_tokens: int = 48
) -> Verification:
    """Load both directories again and let transformers decode each prompt plainly and with the drafter.

    The prompts go in as they are, without a chat template. Speculation is on only where the target was
    called less often than tokens came out, so the calls are counted.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(out_dir, trust_remote_code=False)
    target, draft = (
        AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, use_safetensors=True, trust_remote_code=False
        ).eval()
        for path in (target_dir, out_dir)
    )
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    identical = tokens = 0
    for prompt in prompts:
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        arguments = {**inputs, "do_sample": False, "max_new_tokens": max_new_tokens}
        plain = target.generate(**arguments)
        hook = target.register_forward_hook(count)
        assisted = target.generate(**arguments, assistant_model=draft)
        hook.remove()
        identical += int(torch.equal(plain, assisted))
        tokens += assisted.shape[1] - inputs["input_ids"].shape[1]
    return Verification(len(prompts), identical, tokens, calls)
