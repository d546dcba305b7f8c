"""The whole decoder on random tiny models: exact at temperature 0, the target's law when sampling, exact stop
rules.
"""

import pytest
import torch
from scipy.stats import chi2

from data.errors import UserError
from evaluation.decoder.drafters import DraftModel, ModelDrafter, NgramDrafter
from evaluation.decoder.engine import Decoder, Output, Request, common_prefix
from evaluation.decoder.runner import Runner
from evaluation.decoder.sampling import SamplingOptions
from tests.evaluation.decoder.tiny_models import FAMILIES, VOCAB, family, llama, prompts

GREEDY = SamplingOptions()
EOS = 7


def decoder(
    target, drafter_model=None, count=0, batch=4, options=GREEDY, vocab=None, argmax=False, **changes
) -> Decoder:
    runner = Runner(target, batch, 128)
    drafter = None
    if drafter_model == "ngram":
        drafter = NgramDrafter()
    elif drafter_model is not None:
        drafter = ModelDrafter(DraftModel(drafter_model, vocab), runner, options, argmax=argmax)
    return Decoder(
        runner, eos_ids=[EOS], options=options, drafter=drafter, num_speculative_tokens=count, **changes
    )


def requests(count: int = 8, new: int = 24) -> list[Request]:
    return [Request(prompt, new, seed=i) for i, prompt in enumerate(prompts(count))]


def tokens(outputs: list[Output]) -> list[list[int]]:
    return [output.tokens for output in outputs]


@pytest.mark.parametrize("name", FAMILIES)
def test_plain_greedy_equals_transformers_generate(name: str) -> None:
    model = family(name)
    for request, output in zip(requests(), decoder(model, batch=3).generate(requests()), strict=True):
        prompt = torch.tensor([request.prompt])
        expected = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=EOS,
            pad_token_id=0,
        )[0, len(request.prompt) :].tolist()
        assert output.tokens == expected
        assert output.finish_reason == ("stop" if EOS in expected else "length")


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("drafter", ["other", "ngram", "self", "reduced"])
def test_speculative_greedy_equals_plain(drafter: str, count: int) -> None:
    target = llama(0)
    vocab = None
    model: object = {
        "other": llama(5),
        "ngram": "ngram",
        "self": target,
        "reduced": llama(6, vocab_size=VOCAB),
    }[drafter]
    if drafter == "reduced":
        vocab = torch.arange(0, VOCAB, 3)
        model.lm_head.weight = torch.nn.Parameter(target.lm_head.weight[vocab].detach())
    plain = decoder(target).generate(requests())
    speculative = decoder(target, model, count, vocab=vocab).generate(requests())
    assert tokens(speculative) == tokens(plain)
    accepted = sum(a for output in speculative for _, a in output.rounds)
    proposed = sum(p for output in speculative for p, _ in output.rounds)
    if drafter == "self":
        # All but what stands behind a row's end inside its last round.
        assert accepted == proposed and proposed > 0
    else:
        assert accepted < proposed  # the drafter is really another one


def test_the_last_drafted_tokens_missing_entry_costs_no_acceptance() -> None:
    """A drafter that agrees always, over many fully accepted rounds: one wrong cache entry would show."""
    target = llama(0)
    outputs = decoder(target, target, 2, batch=1).generate([Request([3, 4, 5], 60)])
    assert all(proposed == accepted for proposed, accepted in outputs[0].rounds)
    assert len(outputs[0].rounds) >= len(outputs[0].tokens) // 3


@pytest.mark.parametrize("new", [1, 2, 4, 5])
@pytest.mark.parametrize("drafter", [None, "self"])
def test_max_new_tokens_is_exact(new: int, drafter: str | None) -> None:
    target = llama(0)
    outputs = decoder(target, target if drafter else None, 4 if drafter else 0).generate(requests(new=new))
    assert tokens(outputs) == [full[:new] for full in tokens(decoder(target).generate(requests()))]


def test_nothing_follows_an_end_inside_an_accepted_block() -> None:
    target = llama(0)
    outputs = decoder(target, target, 8).generate(requests(16, 48))
    stopped = [output for output in outputs if output.finish_reason == "stop"]
    assert stopped, "no row met EOS: the test would prove nothing"
    assert all(output.tokens.count(EOS) == 1 and output.tokens[-1] == EOS for output in stopped)
    assert any(output.truncated for output in stopped)


def test_a_row_does_not_depend_on_its_batch() -> None:
    options = SamplingOptions(1.0)
    target = llama(0)
    wanted = requests()
    crowd = decoder(target, batch=3, options=options).generate(wanted)
    alone = [decoder(target, batch=1, options=options).generate([request])[0] for request in wanted]
    assert tokens(crowd) == tokens(alone)
    assert len({tuple(t) for t in tokens(crowd)}) > 1


def test_a_shared_prefix_is_read_once_and_changes_nothing() -> None:
    assert common_prefix([[1, 2, 3], [1, 2, 4]]) == 2
    assert common_prefix([[1, 2], [1, 2]]) == 1
    assert common_prefix([[1, 2]]) == 0
    head = [5, 6, 8, 9, 10, 11]
    wanted = [Request([*head, *request.prompt], 16) for request in requests()]
    target = llama(0)
    alone = [decoder(target, batch=1).generate([request])[0] for request in wanted]
    assert tokens(decoder(target, batch=3).generate(wanted)) == tokens(alone)


@pytest.mark.parametrize("options", [GREEDY, SamplingOptions(1.0)])
def test_a_drafter_that_stops_early_proposes_less_and_changes_nothing_else(options: SamplingOptions) -> None:
    target = llama(0)
    runner = Runner(target, 4, 128)
    cautious = ModelDrafter(DraftModel(llama(5)), runner, options, stop_below=0.5)
    engine = Decoder(runner, eos_ids=[EOS], options=options, drafter=cautious, num_speculative_tokens=5)
    outputs = engine.generate(requests())
    proposed = {p for output in outputs for p, _ in output.rounds}
    assert min(proposed) < 5 and max(proposed) > 1
    if options.greedy:
        assert tokens(outputs) == tokens(decoder(target).generate(requests()))


def test_kept_states_predict_the_emitted_tokens() -> None:
    target = llama(0)
    wanted = requests()
    for request, output in zip(
        wanted, decoder(target, llama(5), 3, keep_states=True).generate(wanted), strict=True
    ):
        count = len(output.tokens)
        hidden = torch.cat(output.states.hidden)[:count]
        summary = torch.cat(output.states.logits_summary)[:count]
        with torch.inference_mode():
            logits = target(torch.tensor([[*request.prompt, *output.tokens]])).logits[
                0, len(request.prompt) - 1 : -1
            ]
        assert torch.allclose(target.lm_head(hidden), logits, atol=2e-4)
        assert torch.allclose(summary[:, 0].float(), logits.logsumexp(-1), atol=2e-4)
        assert summary[:, 1].long().tolist() == output.tokens


def test_the_target_as_its_own_drafter_accepts_everything_when_sampling() -> None:
    target = llama(0)
    outputs = decoder(target, target, 4, options=SamplingOptions(1.0, 0.9)).generate(requests(16))
    rounds = [pair for output in outputs for pair in output.rounds]
    assert all(proposed == accepted for proposed, accepted in rounds)


SMALL = {"vocab_size": 4, "initializer_range": 0.25}
ROWS = 2500


def first_tokens_chi_square(
    drafter_options: SamplingOptions | None, argmax: bool = False, stop_below: float = 0.0
) -> float:
    """p-value of the first three sampled tokens' joint counts against the target's exact law."""
    target, draft = llama(0, **SMALL), llama(5, **SMALL)
    options = SamplingOptions(0.8)
    runner = Runner(target, 600, 64)
    drafter = ModelDrafter(
        DraftModel(draft), runner, drafter_options or options, argmax=argmax, stop_below=stop_below
    )
    if drafter_options is not None:  # lie about what was drawn from: the control
        drafter.choose = lying(drafter.choose, options)
    engine = Decoder(runner, eos_ids=[], options=options, drafter=drafter, num_speculative_tokens=2)
    outputs = engine.generate([Request([1, 2, 3], 3, seed=i) for i in range(ROWS)])
    cells = torch.tensor(tokens(outputs)) @ torch.tensor([16, 4, 1])
    observed = torch.bincount(cells, minlength=64).double()
    expected = exact_law(target, [1, 2, 3], options) * ROWS
    common = expected >= 5
    observed = torch.cat((observed[common], observed[~common].sum()[None]))
    expected = torch.cat((expected[common], expected[~common].sum()[None]))
    statistic = ((observed - expected) ** 2 / expected.clamp(min=1e-9)).sum()
    return float(chi2.sf(float(statistic), len(expected) - 1))


def lying(choose, options):
    from evaluation.decoder.sampling import probabilities

    def wrong(logits, uniform):
        token, _, confidence = choose(logits, uniform)
        return token, probabilities(logits, options), confidence

    return wrong


def exact_law(target, prompt: list[int], options: SamplingOptions) -> torch.Tensor:
    """float64 `[64]`: the law of three tokens after the prompt, by enumeration."""
    from evaluation.decoder.sampling import probabilities

    grid = torch.cartesian_prod(*[torch.arange(4)] * 3)
    ids = torch.cat((torch.tensor(prompt).expand(64, -1), grid), dim=1)
    with torch.inference_mode():
        probs = probabilities(target(ids).logits[:, len(prompt) - 1 : -1].double(), options)
    return probs.gather(2, grid[..., None])[..., 0].prod(dim=1)


@pytest.mark.parametrize(("argmax", "stop_below"), [(False, 0.0), (True, 0.0), (False, 0.4)])
def test_sampled_output_follows_the_targets_law(argmax: bool, stop_below: float) -> None:
    assert first_tokens_chi_square(None, argmax, stop_below) > 1e-4


def test_a_draft_distribution_at_the_wrong_temperature_is_caught() -> None:
    assert first_tokens_chi_square(SamplingOptions(2.0)) < 1e-6


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request([], 4), "no tokens"),
        (Request([1], 0), "at least 1"),
        (Request([1] * 120, 20), "positions"),
    ],
)
def test_impossible_requests_are_refused_before_any_work(request_: Request, message: str) -> None:
    with pytest.raises(UserError, match=message):
        decoder(llama()).generate([request_])


def test_ngram_copies_what_followed_the_longest_earlier_match() -> None:
    drafter = NgramDrafter()
    assert drafter.look_up([1, 2, 3, 4, 9, 2, 3], 3) == [4, 9, 2]
    assert drafter.look_up([1, 2, 3], 3) == []
    assert drafter.look_up([5, 5], 3) == [5]
