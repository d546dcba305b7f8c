"""The built-in sampling engine: plain decoding by our own decoder, which can keep the target's signals in
the same pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

from data.engines import Completion, SampleRequest
from data.signals import Signals
from evaluation.decoder.engine import Decoder, Output, Request
from evaluation.decoder.runner import Runner
from evaluation.decoder.sampling import SamplingOptions


class BuiltinSampler:
    """Samples a target in batches of ragged rows; see `data.engines.SamplingEngine`."""

    def __init__(
        self,
        target: PreTrainedModel,
        *,
        eos_ids: Sequence[int],
        batch_size: int,
        max_length: int,
        signal_temperature: float | None,
    ) -> None:
        """`signal_temperature` is that of the signals' log-normaliser; None keeps no signals."""
        self.target = Runner(target, batch_size, max_length)
        self.eos_ids = eos_ids
        self.signal_temperature = signal_temperature

    def sample(
        self,
        requests: Sequence[SampleRequest],
        *,
        temperature: float,
        max_new_tokens: int,
        on_tokens: Callable[[int], None],
    ) -> list[Completion]:
        """Completions with signals, in the order of the requests."""
        decoder = Decoder(
            self.target,
            eos_ids=self.eos_ids,
            options=SamplingOptions(temperature=temperature),
            keep_states=self.signal_temperature is not None,
            signal_temperature=self.signal_temperature or 1.0,
        )
        wanted = [Request(request.prompt, max_new_tokens, request.seed) for request in requests]
        return [
            Completion(output.tokens, output.finish_reason, self.signals(output))
            for output in decoder.generate(wanted, on_tokens)
        ]

    def signals(self, output: Output) -> Signals | None:
        """The states of an output as signals, one row per emitted token."""
        return None if self.signal_temperature is None else signals_of(output)


def signals_of(output: Output) -> Signals:
    """The states of an output as signals, one row per emitted token."""
    count = len(output.tokens)
    summary = torch.cat(output.states.logits_summary)[:count]
    return Signals(
        hidden=torch.cat(output.states.hidden)[:count],
        logsumexp=summary[:, 0].float(),
        argmax=summary[:, 1].long(),
    )
