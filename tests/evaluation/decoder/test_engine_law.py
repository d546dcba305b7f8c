"""The whole decoder when it samples: its joint law is the target's, with controls that must fail."""

import itertools
from functools import partial

import pytest
import torch
from scipy.stats import norm

from data.errors import UserError
from evaluation.decoder.engine import Request
from evaluation.decoder.guard import Guard
from evaluation.decoder.sampling import SamplingOptions, probabilities
from tests.evaluation.decoder.decoders import GREEDY, decoder, requests, tokens
from tests.evaluation.decoder.test_verify import (
    BonusFromTheDraft,
    EarlyBreak,
    NoResidual,
    OffByOneColumn,
    OffByOneRow,
    p_value,
)
from tests.evaluation.decoder.tiny_models import llama, relative

VOCAB = 8
ROWS = 1200
MANY, FEW = 180, 48  # tokens of an answer: some 200,000 and 50,000 rounds at K = 2
SAMPLED = SamplingOptions(0.8, top_p=0.9)


def markov(seed: int):
    """A model of 8 ids whose next token depends on the last one alone, so that its law is known exactly."""
    size = {"num_attention_heads": 1, "num_key_value_heads": 1, "hidden_size": 16, "intermediate_size": 16}
    model = llama(seed, vocab_size=VOCAB, num_hidden_layers=1, **size)
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.lm_head.weight *= 0.4  # flat enough that some drafts stand and some are cut
    return model


TARGET, DRAFT = markov(0), markov(1)


def transitions(options: SamplingOptions) -> torch.Tensor:
    """float64 `[8, 8]`: the target's exact law after each id."""
    with torch.inference_mode():
        logits = TARGET(torch.arange(VOCAB)[:, None]).logits[:, 0]
    return probabilities(logits.double(), options)


def law_p_value(options: SamplingOptions = SAMPLED, answer: int = FEW, change=None, **settings) -> float:
    """p-value of three tokens' joint counts given the one before, over 1200 answers.

    Windows of four tokens tile the answers, so rounds begin and end anywhere in them.
    """
    count = settings.pop("count", 2)
    engine = decoder(TARGET, DRAFT, count, ROWS, options, length=answer + 8, eos=(), **settings)
    if change:
        change(engine)
    outputs = engine.generate([Request([1, i % VOCAB], answer, seed=i) for i in range(ROWS)])
    assert engine.account.rounds > ROWS * answer / (count + 1) / 2
    text = torch.tensor(tokens(outputs))
    windows = text[:, : answer // 3 * 3 - 2].unfold(1, 4, 3).reshape(-1, 4)
    cells = windows @ torch.tensor([VOCAB**3, VOCAB**2, VOCAB, 1])
    after = transitions(options)
    law = after[:, :, None, None] * after[None, :, :, None] * after[None, None]
    starts = torch.bincount(windows[:, 0], minlength=VOCAB).double()
    return p_value(torch.bincount(cells, minlength=VOCAB**4), (law * starts[:, None, None, None]).flatten())


@pytest.mark.parametrize(
    "settings",
    [
        {"answer": MANY},
        {"answer": MANY, "rule": "token"},
        {"rule": "shared_noise"},
        {"answer": MANY, "argmax": True},
        {"stop_below": 0.15, "count": 4},
        {"options": SamplingOptions(1.3, top_k=5, min_p=0.05)},
        {"guard": Guard([1.0, 1.5, 2.0])},
    ],
    ids=lambda settings: "-".join(settings) or "defaults",  # no object in them: they name the tests
)
def test_answers_follow_the_targets_law(settings: dict) -> None:
    assert law_p_value(**settings) > 1e-4


def lying(options: SamplingOptions, engine) -> None:
    """The drafter draws from one distribution and tells another."""
    drafter = engine.drafter
    choose = drafter.choose

    def wrong(logits, draws, step):
        token, _, confidence = choose(logits, draws, step)
        return token, probabilities(logits, options), confidence

    drafter.choose = wrong


@pytest.mark.parametrize(
    "told", [SamplingOptions(1.6, top_p=0.9), SamplingOptions(0.8)], ids=["wrong temperature", "before top-p"]
)
@pytest.mark.parametrize("rule", ["block", "token"])
def test_a_draft_that_was_drawn_from_something_else_is_caught(rule: str, told: SamplingOptions) -> None:
    assert law_p_value(rule=rule, change=partial(lying, told)) < 1e-6


@pytest.mark.parametrize(
    ("rule", "wrong"),
    [
        ("token", NoResidual),
        ("token", BonusFromTheDraft),
        ("token", OffByOneColumn),
        ("token", OffByOneRow),
        ("block", EarlyBreak),
    ],
)
def test_a_wrong_rule_in_the_engine_is_caught(rule: str, wrong, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"evaluation.decoder.judge.{rule.upper()}", wrong())
    assert law_p_value(rule=rule) < 1e-6


def test_penalties_reach_both_models_inside_a_draft_block() -> None:
    """Three sampled tokens against the exact law, whose every step is penalised by the tokens before it."""
    options = SamplingOptions(1.0, repetition_penalty=1.5, presence_penalty=0.7, frequency_penalty=0.5)
    target = llama(0, vocab_size=4, initializer_range=0.25)
    draft = llama(5, vocab_size=4, initializer_range=0.25)
    prompt, rows = [1, 2, 2], 2500
    engine = decoder(target, draft, 2, 600, options, length=64, eos=())
    answers = torch.tensor(tokens(engine.generate([Request(prompt, 3, seed=i) for i in range(rows)])))
    observed = torch.bincount(answers @ torch.tensor([16, 4, 1]), minlength=64)
    assert p_value(observed, rows * law_by_hand(target, prompt, options)) > 1e-4
    assert p_value(observed, rows * law_by_hand(target, prompt, SamplingOptions(1.0))) < 1e-6
    assert 0 < engine.account.accepted < engine.account.drafted


def law_by_hand(target, prompt: list[int], options: SamplingOptions) -> torch.Tensor:
    """float64 `[64]`: the law of three tokens of four ids, with the penalties written out."""
    answers = itertools.product(range(4), repeat=3)
    chances = [chance_by_hand(target, prompt, list(answer), options) for answer in answers]
    return torch.tensor(chances, dtype=torch.float64)


def chance_by_hand(target, prompt: list[int], answer: list[int], options: SamplingOptions) -> float:
    chance = 1.0
    for length, token in enumerate(answer):
        before = answer[:length]
        with torch.no_grad():
            logits = target(torch.tensor([prompt + before])).logits[0, -1].double()
        for v in range(len(logits)):
            if v in prompt + before:
                factor = options.repetition_penalty
                logits[v] = logits[v] / factor if logits[v] > 0 else logits[v] * factor
            logits[v] -= options.presence_penalty * (v in before)
            logits[v] -= options.frequency_penalty * before.count(v)
        chance *= float(logits.softmax(dim=0)[token])
    return chance


@pytest.mark.parametrize("model", ["other", "relative", "ngram"])
@pytest.mark.parametrize("count", [1, 3, 8])
@pytest.mark.parametrize("guard", [False, True])
def test_with_shared_noise_speculative_sampling_gives_plain_samplings_tokens(
    model: str, count: int, guard: bool
) -> None:
    target = llama(0)
    options = SamplingOptions(1.0, top_p=0.95, presence_penalty=0.3)
    draft = {"other": llama(5), "relative": relative(target), "ngram": "ngram"}[model]
    plain = decoder(target, batch=8, options=options, rule="shared_noise").generate(requests(8, 40))
    watch = Guard([1.0] + [2.0] * 8) if guard else None
    engine = decoder(target, draft, count, 3, options, rule="shared_noise", guard=watch)
    assert tokens(engine.generate(requests(8, 40))) == tokens(plain)
    assert engine.account.accepted < engine.account.drafted
    other = decoder(target, batch=8, options=options).generate(requests(8, 40))
    assert tokens(other) != tokens(plain)  # drawn by inversion


@pytest.mark.parametrize("rule", ["block", "token", "shared_noise"])
def test_the_target_as_its_own_drafter_accepts_everything(rule: str) -> None:
    target = llama(0)
    for options in (SAMPLED, SamplingOptions(1.0, repetition_penalty=1.2, frequency_penalty=0.2)):
        engine = decoder(target, target, 4, options=options, rule=rule)
        engine.generate(requests(16))
        assert engine.account.accepted == engine.account.drafted > 150


def test_a_top_k_of_one_is_greedy() -> None:
    target = llama(0)
    sampled = decoder(target, relative(target), 4, options=SamplingOptions(1.0, top_k=1))
    assert tokens(sampled.generate(requests())) == tokens(decoder(target).generate(requests()))


@pytest.mark.parametrize("rule", ["block", "token", "shared_noise"])
def test_sampled_rows_do_not_depend_on_their_batch(rule: str) -> None:
    target, wanted = llama(0), requests(8)
    wanted[3:5] = [Request(wanted[3].prompt, 7, seed=3), Request(wanted[4].prompt, 2, seed=4)]
    for model, count in ((None, 0), (relative(target), 4)):
        settings = {"options": SamplingOptions(1.0), "rule": rule}
        crowd = decoder(target, model, count, 8, **settings).generate(wanted)
        alone = [decoder(target, model, count, 1, **settings).generate([one])[0] for one in wanted]
        assert tokens(crowd) == tokens(alone)
        assert len({tuple(t) for t in tokens(crowd)}) > 1


@pytest.mark.parametrize(
    "settings", [{}, {"rule": "token"}, {"rule": "shared_noise"}, {"argmax": True}], ids=str
)
def test_expected_acceptance_accumulates_beside_the_actual(settings: dict) -> None:
    """Per row the two differ by chance alone: the mean difference is within 4 standard errors of 0."""
    engine = decoder(TARGET, DRAFT, 3, 300, SAMPLED, eos=(), **settings)
    outputs = engine.generate([Request([1, i % VOCAB], 100, seed=i) for i in range(300)])
    used = "one_hot" if settings.get("argmax") else settings.get("rule", "block")
    differences = torch.tensor([output.account.accepted - output.expected[used] for output in outputs])
    error = differences.std() / len(outputs) ** 0.5
    assert 2 * norm.sf(abs(float(differences.mean() / error))) > 1e-4
    expected = engine.account.expected
    assert set(expected) == ({"block", "token"} if used in ("block", "token") else {used})
    if used == "block":
        assert expected["block"] > 1.01 * expected["token"]
    assert expected[used] == pytest.approx(engine.account.accepted, rel=0.05)


class Broken:
    """Makes a runner's logits NaN from its `after`-th call on, for all calls or for the `only`-th."""

    def __init__(self, runner, after: int, only: bool = False) -> None:
        self.logits, self.after, self.only, self.calls = runner.logits, after, only, 0
        runner.logits = self

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        broken = self.calls == self.after if self.only else self.calls >= self.after
        return self.logits(hidden) * (torch.nan if broken else 1.0)


@pytest.mark.parametrize("options", [GREEDY, SamplingOptions(1.0), SamplingOptions(1.0, 0.8, top_k=9)])
@pytest.mark.parametrize("rule", ["block", "token", "shared_noise"])
def test_a_draft_that_is_not_a_number_falls_back_to_the_target(options: SamplingOptions, rule: str) -> None:
    target = llama(0)
    engine = decoder(target, relative(target), 4, options=options, rule=rule)
    Broken(engine.drafter.runner, 6)  # in the middle of a block
    outputs = engine.generate(requests())
    assert {proposed for output in outputs for proposed, _ in output.rounds} >= {0, 4}
    assert all(0 <= token < 48 for output in outputs for token in output.tokens)
    if options.greedy or rule == "shared_noise":
        plain = decoder(target, options=options, rule=rule).generate(requests())
        assert tokens(outputs) == tokens(plain)


def test_a_draft_that_is_sometimes_not_a_number_keeps_the_targets_law() -> None:
    def break_often(engine) -> None:
        choose, drafter = engine.drafter.choose, engine.drafter

        def sometimes(logits, draws, step):
            rows = (torch.arange(len(logits)) + draws.position) % 5 == step
            return choose(logits.masked_fill(rows[:, None], torch.nan), draws, step)

        drafter.choose = sometimes

    assert law_p_value(change=break_often) > 1e-4


@pytest.mark.parametrize("options", [GREEDY, SamplingOptions(1.0), SamplingOptions(1.0, 0.8, top_k=9)])
@pytest.mark.parametrize("after", [1, 9])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_target_that_is_not_a_number_raises(options: SamplingOptions, after: int, value: float) -> None:
    target = llama(0)
    for model, count in ((None, 0), (relative(target), 3)):
        engine = decoder(target, model, count, options=options)
        Broken(engine.runner, after)
        with pytest.raises(UserError, match="not finite"):
            engine.generate(requests())


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(UserError, match="typical"):
        decoder(llama(0), rule="typical")
