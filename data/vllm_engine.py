"""The engine `vllm`: offline `LLM.generate` in this process, for targets that need it.

No extra of the package, for vLLM asks for an older transformers than ours (docs/sampling.md). Tests hold it
to a recorded schema of vLLM 0.11 and later; it has never run on a GPU here. vLLM refuses data parallelism
within one `LLM`: for that, serve the target with `vllm serve --data-parallel-size N` and sample with the
engine `openai`, which spans machines as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from data.engines import Completion, Failure, FailureStreak, SampleRequest
from data.errors import UserError
from data.openai_api import SEED_BITS


class VllmConfig(BaseModel):
    """How vLLM spreads the target over GPUs; passed on as it is."""

    model_config = ConfigDict(extra="forbid")

    tensor_parallel_size: int = Field(default=1, ge=1)
    pipeline_parallel_size: int = Field(default=1, ge=1)
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)


class VllmEngine:
    """Samples the target with vLLM; see `data.engines.SamplingEngine`. Completions carry no signals."""

    def __init__(
        self, model: Path, dtype: str, config: VllmConfig, *, max_length: int, eos_ids: Sequence[int]
    ) -> None:
        """`max_length`: positions of the longest prompt with its answer. Raises UserError without vLLM."""
        try:
            from vllm import LLM
        except ImportError as error:
            raise UserError(
                "sample.engine is vllm, which is not installed here: run `vllm serve` in an environment of "
                "its own and sample with engine openai (docs/sampling.md)"
            ) from error
        self.eos_ids = list(eos_ids)
        self.streak = FailureStreak()
        self.llm: Any = LLM(
            model=str(model),
            dtype=dtype,
            max_model_len=max_length,
            generation_config="vllm",  # not the model's own, which may cut the distribution
            trust_remote_code=False,
            **config.model_dump(),
        )

    def sample(
        self,
        requests: Sequence[SampleRequest],
        *,
        temperature: float,
        max_new_tokens: int,
        on_tokens: Callable[[int], None],
    ) -> list[Completion | Failure]:
        """Completions in the order of the requests."""
        from vllm import SamplingParams

        params = [
            SamplingParams(
                temperature=temperature,
                top_p=1.0,
                seed=request.seed % 2**SEED_BITS,
                max_tokens=max_new_tokens,
                stop_token_ids=self.eos_ids,
                detokenize=False,
            )
            for request in requests
        ]
        prompts = [{"prompt_token_ids": list(request.prompt)} for request in requests]
        results = []
        for request, output in zip(requests, self.llm.generate(prompts, params, use_tqdm=False), strict=True):
            results.append(result := self.read(output, request))
            self.streak.hear(result)
            if isinstance(result, Completion):
                on_tokens(len(result.tokens))
        return results

    def read(self, output: Any, request: SampleRequest) -> Completion | Failure:
        """The completion in one `RequestOutput`."""
        answer = output.outputs[0]
        tokens = list(answer.token_ids)
        if list(output.prompt_token_ids) != list(request.prompt):
            return Failure("vLLM read other token ids than were sent")
        if answer.finish_reason not in ("stop", "length") or not tokens:
            return Failure(f"vLLM ended with {answer.finish_reason!r} after {len(tokens)} tokens")
        return Completion(tokens, answer.finish_reason, None)
