"""The built-in sampling engine: plain decoding by our own decoder, which can keep the target's signals in
the same pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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
        layers: Sequence[int] = (),
    ) -> None:
        """`signal_temperature` is that of the signals' log-normaliser; None keeps no signals. `layers`: those
        whose inputs are kept too, as the signals' features.
        """
        self.target = Runner(target, batch_size, max_length)
        if layers:
            self.target.tap(layers)
        self.batch_size = batch_size
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
        """Completions, with signals where they are kept, in the order of the requests."""
        if not requests:
            return []
        outputs = self.decoder(temperature).generate(decoder_requests(requests, max_new_tokens), on_tokens)
        keep = self.signal_temperature is not None
        return [
            Completion(output.tokens, output.finish_reason, signals_of(output) if keep else None)
            for output in outputs
        ]

    def decoder(self, temperature: float) -> Decoder:
        """The decoder of a temperature's samples."""
        return self.make_decoder(temperature)

    def make_decoder(self, temperature: float, **more: Any) -> Decoder:
        """A decoder of this target that keeps signals where they are wanted; `more` as `Decoder` takes it."""
        return Decoder(
            self.target,
            eos_ids=self.eos_ids,
            options=SamplingOptions(temperature=temperature),
            keep_states=self.signal_temperature is not None,
            signal_temperature=self.signal_temperature or 1.0,
            **more,
        )


def decoder_requests(requests: Sequence[SampleRequest], max_new_tokens: int) -> list[Request]:
    """What the decoder is asked for them."""
    return [Request(request.prompt, max_new_tokens, request.seed) for request in requests]


def signals_of(output: Output) -> Signals:
    """The states of an output as signals, one row per emitted token."""
    count = len(output.tokens)
    summary = torch.cat(output.states.logits_summary)[:count]
    return Signals(
        hidden=torch.cat(output.states.hidden)[:count],
        logsumexp=summary[:, 0].float(),
        argmax=summary[:, 1].long(),
        features=output.states.features,
    )
