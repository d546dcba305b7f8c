"""Sampling the target through speculation with the drafter of an earlier round: `sample.drafter`.

Each position draws its token with random numbers of that position alone ("shared_noise"), so the samples are
those of plain sampling by the same rule, whatever the drafter: a bad one costs time, never quality. Plain
sampling without a drafter draws by another rule, which is cheaper; its samples at a temperature above 0 are
others, from the same distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from data.engines import Completion, SampleRequest
from evaluation.decoder.drafters import DraftModel
from evaluation.decoder.engine import Decoder, Output, Request
from evaluation.decoder.kinds import make_drafter
from evaluation.decoder.runner import Runner
from evaluation.decoder.sampler import signals_of
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


class SpeculativeSampler:
    """Samples a target in batches of ragged rows with a drafter; see `data.engines.SamplingEngine`."""

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: DraftModel,
        num_speculative_tokens: int,
        *,
        eos_ids: Sequence[int],
        batch_size: int,
        max_length: int,
        signal_temperature: float | None,
    ) -> None:
        """`signal_temperature` is that of the signals' log-normaliser; None keeps no signals."""
        self.target = Runner(target, batch_size, max_length)
        self.drafter = drafter
        self.count = num_speculative_tokens
        self.batch_size = batch_size
        self.eos_ids = eos_ids
        self.signal_temperature = signal_temperature
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
        """Completions with signals, in the order of the requests."""
        wanted = [Request(request.prompt, max_new_tokens, request.seed) for request in requests]
        if temperature not in self.decoders and wanted:
            self.decoders[temperature] = self.decoder(temperature, speculative=True)
            self.gains.append(self.measure(wanted[: self.batch_size], temperature))
        outputs = self.decoders[temperature].generate(wanted, on_tokens) if wanted else []
        return [
            Completion(
                output.tokens,
                output.finish_reason,
                None if self.signal_temperature is None else signals_of(output),
            )
            for output in outputs
        ]

    def decoder(self, temperature: float, *, speculative: bool) -> Decoder:
        options = SamplingOptions(temperature=temperature)
        return Decoder(
            self.target,
            eos_ids=self.eos_ids,
            options=options,
            drafter=make_drafter(self.drafter, self.target, options) if speculative else None,
            num_speculative_tokens=self.count if speculative else 0,
            rule="shared_noise",
            keep_states=self.signal_temperature is not None,
            signal_temperature=self.signal_temperature or 1.0,
        )

    def measure(self, requests: Sequence[Request], temperature: float) -> Gain:
        """One batch both ways, after a token of each that warms up."""
        plain, speculative = self.decoder(temperature, speculative=False), self.decoders[temperature]
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
