"""Decoders over tiny models, as the tests of the engine put them together."""

from evaluation.decoder.drafters import DraftModel, ModelDrafter
from evaluation.decoder.engine import Decoder, Output, Request
from evaluation.decoder.ngram import NgramDrafter
from evaluation.decoder.runner import Runner
from evaluation.decoder.sampling import SamplingOptions
from tests.evaluation.decoder.tiny_models import prompts

GREEDY = SamplingOptions()
EOS = 7


def decoder(
    target, drafter_model=None, count=0, batch=4, options=GREEDY, vocab=None, *, argmax=False, length=128,
    stop_below=0.0, eos=(EOS,), kind=Decoder, **settings,
) -> Decoder:  # fmt: skip
    """A decoder of `target`, drafting with a model, or with "ngram" look-up, or not at all."""
    runner = Runner(target, batch, length)
    drafter = None
    if drafter_model == "ngram":
        drafter = NgramDrafter()
    elif drafter_model is not None:
        drafter = ModelDrafter(
            DraftModel(drafter_model, vocab), runner, options, argmax=argmax, stop_below=stop_below
        )
    return kind(
        runner, eos_ids=eos, options=options, drafter=drafter, num_speculative_tokens=count, **settings
    )


def requests(count: int = 8, new: int = 24) -> list[Request]:
    return [Request(prompt, new, seed=i) for i, prompt in enumerate(prompts(count))]


def tokens(outputs: list[Output]) -> list[list[int]]:
    return [output.tokens for output in outputs]
