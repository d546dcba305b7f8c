"""What the built-in sampling engine is measured beside: transformers' generate, and itself in several
processes of one thread each. Both are sampling engines too; see `data.engines.SamplingEngine`.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from data.engines import Completion, Failure, SampleRequest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from evaluation.decoder.sampler import BuiltinSampler


class GenerateEngine:
    """transformers' generate over batches of prompts of like length, padded on the left."""

    def __init__(
        self, model: PreTrainedModel, eos_ids: Sequence[int], batch_size: int, **arguments: Any
    ) -> None:
        self.model = model
        self.eos_ids = list(eos_ids)
        self.batch_size = batch_size
        self.arguments = arguments

    def sample(
        self,
        requests: Sequence[SampleRequest],
        *,
        temperature: float,
        max_new_tokens: int,
        on_tokens: Callable[[int], None],
    ) -> list[Completion | Failure]:
        """Completions without signals; those that are drawn do not follow the requests' seeds."""
        import torch

        torch.manual_seed(0)
        order = sorted(range(len(requests)), key=lambda place: len(requests[place].prompt))
        drawn = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        results: dict[int, Completion | Failure] = {}
        for first in range(0, len(order), self.batch_size):
            places = order[first : first + self.batch_size]
            made = generate_padded(
                self.model,
                [requests[place].prompt for place in places],
                max_new_tokens=max_new_tokens,
                eos_token_id=self.eos_ids,
                **(drawn if temperature else {"do_sample": False}),
                **self.arguments,
            )
            for place, tokens in zip(places, made, strict=True):
                results[place] = self.completion(tokens)
        return [results[place] for place in range(len(requests))]

    def completion(self, tokens: list[int]) -> Completion:
        """Up to the first end-of-sequence id; what follows is padding."""
        end = next((place for place, token in enumerate(tokens) if token in self.eos_ids), None)
        if end is None:
            return Completion(tokens, "length", None)
        return Completion(tokens[: end + 1], "stop", None)


def generate_padded(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], **arguments: Any
) -> list[list[int]]:
    """The new tokens that transformers' generate makes for one batch of prompts, padded on the left."""
    import torch

    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(list(prompt))
        mask[row, width - len(prompt) :] = 1
    made = model.generate(
        ids.to(model.device), attention_mask=mask.to(model.device), pad_token_id=0, **arguments
    )
    tokens: list[list[int]] = made[:, width:].tolist()
    return tokens


class ProcessesEngine:
    """The built-in engine in several processes of one thread, each with every n-th request."""

    def __init__(self, count: int, model: Path, dtype: str, settings: dict[str, Any]) -> None:
        """`settings`: those of `BuiltinSampler` beside the model."""
        start, loaded = multiprocessing.get_context("spawn"), (model, dtype, settings)
        self.processes = [
            ProcessPoolExecutor(1, start, initializer=_load, initargs=loaded) for _ in range(count)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes:
            process.shutdown()

    def sample(
        self,
        requests: Sequence[SampleRequest],
        *,
        temperature: float,
        max_new_tokens: int,
        on_tokens: Callable[[int], None],
    ) -> list[Completion | Failure]:
        """Completions without signals, which stay in their process."""
        count = len(self.processes)
        running = [
            process.submit(_sample, requests[number::count], temperature, max_new_tokens)
            for number, process in enumerate(self.processes)
        ]
        parts = [future.result() for future in running]
        return [Completion(parts[place % count][place // count], "", None) for place in range(len(requests))]


_own: BuiltinSampler | None = None
"""The engine of a process of `ProcessesEngine`."""


def _load(model: Path, dtype: str, settings: dict[str, Any]) -> None:
    import torch

    from distill.models import load_model
    from evaluation.decoder.sampler import BuiltinSampler

    global _own
    torch.set_num_threads(1)
    loaded = load_model(model, getattr(torch, dtype)).requires_grad_(False).eval()
    _own = BuiltinSampler(loaded, **settings)


def _sample(requests: Sequence[SampleRequest], temperature: float, max_new_tokens: int) -> list[list[int]]:
    assert _own is not None, "the process is not loaded"
    done = _own.sample(
        requests, temperature=temperature, max_new_tokens=max_new_tokens, on_tokens=lambda count: None
    )
    return [each.tokens for each in done]
