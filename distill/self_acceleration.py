"""Sampling the target through speculation with the drafter of an earlier round: `sample.drafter`.

Each position draws its token with random numbers of that position alone ("shared_noise"), so the samples are
those of plain sampling by the same rule, whatever the drafter: a bad one costs time, never quality. Plain
sampling without a drafter draws by another rule, which is cheaper; its samples at a temperature above 0 are
others, from the same distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from data.engines import Completion, SampleRequest
from evaluation.decoder.drafters import DraftModel
from evaluation.decoder.engine import Decoder, Output, Request
from evaluation.decoder.kinds import make_drafter
from evaluation.decoder.sampler import BuiltinSampler, decoder_requests
from evaluation.decoder.sampling import SamplingOptions


@dataclass(frozen=True)
class Gain:
    """Speculative against plain sampling of the same requests in one process, by the same rule."""

    temperature: float
    answers: int
    equal: int
    """Answers with the same tokens. Others part at near ties between forwards of different widths."""
    plain_tokens_per_second: float
    tokens_per_second: float
    """Decoding after the prompt; what the drafter reads of a prompt is a cost of decoding."""
    tokens_per_target_call: float

    @property
    def speedup(self) -> float:
        return self.tokens_per_second / self.plain_tokens_per_second

    def note(self) -> str:
        """The gain in a sentence."""
        verdict = "" if self.speedup > 1 else "; WARNING: slower than plain, so leave sample.drafter out"
        return (
            f"with the drafter {self.speedup:.2f}x plain sampling at temperature {self.temperature:g} "
            f"({self.tokens_per_second:.0f} against {self.plain_tokens_per_second:.0f} tokens/s, "
            f"{self.tokens_per_target_call:.2f} tokens per target call), on the first {self.answers} "
            f"answers, of which {self.equal} are token for token the same{verdict}"
        )


class SpeculativeSampler(BuiltinSampler):
    """The built-in engine with a drafter. The first batch of each temperature is sampled plainly too, and
    `gains` tells what the drafter saved or cost."""

    def __init__(
        self, target: PreTrainedModel, drafter: DraftModel, num_speculative_tokens: int, **settings: Any
    ) -> None:
        """`settings`: those of `BuiltinSampler`."""
        super().__init__(target, **settings)
        self.drafter = drafter
        self.count = num_speculative_tokens
        self.decoders: dict[float, Decoder] = {}
        self.gains: list[Gain] = []

    def sample(
        self,
        requests: Sequence[SampleRequest],
        *,
        temperature: float,
        max_new_tokens: int,
        on_tokens: Callable[[int], None],
    ) -> list[Completion]:
        """See `data.engines.SamplingEngine`."""
        if requests and temperature not in self.decoders:
            first = decoder_requests(requests[: self.batch_size], max_new_tokens)
            self.gains.append(self.measure(first, temperature))
        return super().sample(
            requests, temperature=temperature, max_new_tokens=max_new_tokens, on_tokens=on_tokens
        )

    def decoder(self, temperature: float) -> Decoder:
        """The speculative decoder of a temperature; made once, since its drafter has a cache of its own."""
        if temperature not in self.decoders:
            drafter = make_drafter(self.drafter, self.target, SamplingOptions(temperature=temperature))
            self.decoders[temperature] = self.make_decoder(
                temperature, drafter=drafter, num_speculative_tokens=self.count, rule="shared_noise"
            )
        return self.decoders[temperature]

    def measure(self, requests: Sequence[Request], temperature: float) -> Gain:
        """One batch both ways, after a token of each that warms up."""
        plain, speculative = self.make_decoder(temperature, rule="shared_noise"), self.decoder(temperature)
        found: list[list[Output]] = []
        speeds = []
        for decoder in (plain, speculative):
            decoder.generate([Request(requests[0].prompt, 2)])
            found.append(decoder.generate(requests))
            # The first token of each answer comes from its prompt.
            decoded = sum(len(output.tokens) - 1 for output in found[-1])
            speeds.append(max(decoded, 1) / max(decoder.decode_seconds, 1e-9))
        pairs = zip(*found, strict=True)
        account = speculative.account
        return Gain(
            temperature=temperature,
            answers=len(requests),
            equal=sum(one.tokens == other.tokens for one, other in pairs),
            plain_tokens_per_second=speeds[0],
            tokens_per_second=speeds[1],
            tokens_per_target_call=(account.emitted - account.rows) / max(1, account.rounds),
        )
