"""Drafts accepted at given rates: the rounds are as asked for, and the text is nobody's."""

import pytest

from data.errors import UserError
from evaluation.decoder.sampling import SamplingOptions
from evaluation.decoder.synthetic import FINISH_REASON, PLACEHOLDER, SyntheticDecoder
from tests.evaluation.decoder.decoders import decoder, requests
from tests.evaluation.decoder.tiny_models import llama


def synthetic(rates: list[float], options: SamplingOptions, drafter="ngram", **settings) -> SyntheticDecoder:
    model = llama(5) if drafter == "model" else drafter
    return decoder(
        llama(0), model, 3, 8, options, kind=SyntheticDecoder, conditional_acceptance=rates, **settings
    )


@pytest.mark.parametrize("options", [SamplingOptions(), SamplingOptions(1.0)], ids=["greedy", "sampled"])
def test_drafts_are_accepted_at_the_rates_given_and_nothing_can_be_read(options: SamplingOptions) -> None:
    rates = [0.9, 0.5, 0.7]
    engine = synthetic(rates, options, "model")
    outputs = engine.generate(requests(30, 100))
    account = engine.account
    for reached, rate, wanted in zip(account.reached, account.conditional_acceptance, rates, strict=True):
        assert rate == pytest.approx(wanted, abs=4 * (wanted * (1 - wanted) / reached) ** 0.5)
    assert account.expected[FINISH_REASON] == pytest.approx(account.accepted, rel=0.05)
    for output in outputs:
        assert output.tokens == [PLACEHOLDER] * 100 and output.finish_reason == FINISH_REASON
        output.account.check()


@pytest.mark.parametrize(("rate", "rounds"), [(1.0, 25), (0.0, 99)])
def test_certain_rates(rate: float, rounds: int) -> None:
    outputs = synthetic([rate] * 3, SamplingOptions(), "model").generate(requests(4, 100))
    assert [len(output.rounds) for output in outputs] == [rounds] * 4


@pytest.mark.parametrize("rates", [[0.5, 0.5], [0.5, 0.5, 1.5], [-0.1, 0.5, 0.5]])
def test_impossible_rates_are_refused(rates: list[float]) -> None:
    with pytest.raises(UserError, match="synthetic acceptance rates"):
        synthetic(rates, SamplingOptions())


def test_placeholders_do_not_decode() -> None:
    from tests.evaluation.decoder.test_stop import TOKENIZER

    with pytest.raises(OverflowError):
        TOKENIZER.decode([PLACEHOLDER], skip_special_tokens=False)
