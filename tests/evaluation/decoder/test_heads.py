"""Medusa's and EAGLE's heads in the decoder: the output stays the target's, and they propose what they were
trained to."""

from functools import partial
from typing import Any

import pytest
import torch

from data.records import SampleRecord, Samples
from evaluation.acceptance import accepted_drafts, by_position, rank_rates, teacher_forced
from evaluation.decoder.drafters import DraftModel
from evaluation.decoder.eagle import feature_layers
from evaluation.decoder.engine import Decoder, Request
from evaluation.decoder.guard import Guard
from evaluation.decoder.kinds import kind_of, make_drafter
from evaluation.decoder.runner import Runner
from evaluation.decoder.sampling import SamplingOptions
from evaluation.signals import target_signals
from tests.evaluation.decoder.decoders import EOS, GREEDY, decoder, requests, tokens
from tests.evaluation.decoder.test_engine import PENALISED
from tests.evaluation.decoder.test_engine_law import FEW, ROWS, TARGET, law_p_value
from tests.evaluation.decoder.test_engine_law import VOCAB as FEW_IDS
from tests.evaluation.decoder.tiny_models import HEADS, VOCAB, family, heads, llama

KIND = pytest.mark.parametrize("kind", HEADS)


def drafting(
    kind: str, target: Any, count: int, batch: int = 4, options: SamplingOptions = GREEDY, vocab: Any = None,
    *, argmax: bool = False, stop_below: float = 0.0, int8: bool = False, eos: Any = (EOS,),
    length: int = 128, **settings: Any,
) -> Decoder:  # fmt: skip
    runner = Runner(target, batch, length)
    drafter = make_drafter(
        heads(kind, target, vocab), runner, options, argmax=argmax, stop_below=stop_below, int8=int8
    )
    return Decoder(
        runner, eos_ids=eos, options=options, drafter=drafter, num_speculative_tokens=count, **settings
    )


@KIND
@pytest.mark.parametrize(
    ("count", "batch", "options"),
    [(1, 8, GREEDY), (2, 3, GREEDY), (4, 1, GREEDY), (4, 8, GREEDY), (3, 4, PENALISED)],
)
def test_speculative_greedy_equals_plain(kind: str, count: int, batch: int, options: SamplingOptions) -> None:
    """In ragged batches whose rows end and are refilled, with penalties too."""
    target = llama(0)
    wanted = requests(8)
    wanted[2] = Request(wanted[2].prompt, 3, seed=2)
    plain = decoder(target, batch=8, options=options).generate(wanted)
    engine = drafting(kind, target, count, batch, options)
    assert tokens(engine.generate(wanted)) == tokens(plain)
    assert engine.account.accepted < engine.account.drafted
    assert engine.account.accepted > 0 or options.penalises


@pytest.mark.parametrize("name", ["smollm", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_on_every_family_of_targets(kind: str, name: str) -> None:
    target = family(name)
    engine = drafting(kind, target, 3)
    assert tokens(engine.generate(requests())) == tokens(decoder(target).generate(requests()))
    assert engine.account.drafted > 0


@KIND
@pytest.mark.parametrize(
    "settings",
    [{"vocab": torch.arange(0, VOCAB, 3)}, {"stop_below": 0.2}, {"int8": True}, {"argmax": True},
     {"guard": Guard([1.0, 1.9, 2.8, 3.7])}],
    ids=["reduced", "stopping early", "8 bit", "argmax", "guarded"],
)  # fmt: skip
def test_greedy_output_does_not_depend_on_how_drafting_goes(kind: str, settings: dict[str, Any]) -> None:
    target = llama(0)
    engine = drafting(kind, target, 3, **settings)
    assert tokens(engine.generate(requests())) == tokens(decoder(target).generate(requests()))


@KIND
def test_stop_rules_hold_inside_a_block(kind: str) -> None:
    target = llama(0)
    wanted = requests(16, 48)
    plain = decoder(target, eos=(EOS, 11, 30)).generate(wanted)
    outputs = drafting(kind, target, 4, eos=(EOS, 11, 30)).generate(wanted)
    assert tokens(outputs) == tokens(plain)
    assert [output.finish_reason for output in outputs] == [output.finish_reason for output in plain]
    assert {output.finish_reason for output in outputs} >= {"stop"}


@KIND
def test_prompts_up_to_the_last_position(kind: str) -> None:
    target = llama(0, max_position_embeddings=64)
    wanted = [Request([i % VOCAB for i in range(64 - new + 1)], new) for new in (1, 2, 6)]
    outputs = drafting(kind, target, 4, 2, eos=(), length=64).generate(wanted)
    assert tokens(outputs) == tokens(decoder(target, batch=2, eos=(), length=64).generate(wanted))


@KIND
@pytest.mark.parametrize("rule", ["block", "token", "shared_noise"])
def test_sampled_rows_do_not_depend_on_their_batch(kind: str, rule: str) -> None:
    target, wanted = llama(0), requests(6)
    settings: dict[str, Any] = {"options": SamplingOptions(1.0), "rule": rule}
    crowd = drafting(kind, target, 3, 4, **settings).generate(wanted)
    alone = [drafting(kind, target, 3, 1, **settings).generate([one])[0] for one in wanted]
    assert tokens(crowd) == tokens(alone)
    if rule == "shared_noise":
        assert tokens(crowd) == tokens(decoder(target, **settings).generate(wanted))


def with_heads(kind: str, **settings: Any) -> Any:
    """What puts heads into the engine of `law_p_value`."""

    def change(engine: Any) -> None:
        engine.drafter = make_drafter(heads(kind, TARGET), engine.runner, engine.options, **settings)

    return change


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("medusa", {}),
        ("eagle", {}),
        *(
            pytest.param(kind, settings, marks=pytest.mark.slow)
            for kind in ("medusa", "eagle")
            for settings in ({"rule": "token"}, {"rule": "shared_noise"}, {"argmax": True})
        ),
    ],
    ids=str,
)
def test_answers_follow_the_targets_law(kind: str, settings: dict[str, Any]) -> None:
    """The joint law of three tokens of 8 ids (chi-square, as for the small model)."""
    assert FEW_IDS == 8 and ROWS * FEW > 50_000
    rule = settings.get("rule", "block")
    assert law_p_value(change=with_heads(kind, argmax="argmax" in settings), rule=rule) > 1e-4


@pytest.mark.parametrize("kind", ["medusa", pytest.param("eagle", marks=pytest.mark.slow)])
def test_heads_that_tell_another_distribution_than_they_draw_from_are_caught(kind: str) -> None:
    def lie(engine: Any) -> None:
        with_heads(kind)(engine)
        choose = engine.drafter.choose

        def wrong(logits: torch.Tensor, draws: Any, step: int) -> Any:
            token, probs, confidence = choose(logits, draws, step)
            return token, probs.roll(1, dims=-1), confidence

        engine.drafter.choose = wrong

    assert law_p_value(change=lie) < 1e-6


# What they propose.


def text_of(requested: list[Request], outputs: Any) -> Samples:
    records = [
        SampleRecord(
            prompt_id=str(index), task="any", template="any", split="test", seen_template=True,
            sample_index=0, temperature=0.0, seed=0, input_ids=[*request.prompt, *output.tokens],
            completion_mask=[False] * len(request.prompt) + [True] * len(output.tokens),
            finish_reason="length",
        )
        for index, (request, output) in enumerate(zip(requested, outputs, strict=True))
    ]  # fmt: skip
    return Samples(records, None)


@KIND
@pytest.mark.parametrize("count", [1, 3])
def test_rounds_are_those_that_training_foretells(kind: str, count: int) -> None:
    """Accepted drafts of every round, to the token, from matches over finished text: features, entries and
    rollbacks of the decoder are those of the training-time test."""
    target = llama(0)
    wanted = requests(12, 40)
    engine = drafting(kind, target, count, 5, eos=())
    outputs = engine.generate(wanted)
    tables = by_position(
        heads(kind, target), target.lm_head.weight, text_of(wanted, outputs), temperature=1.0, batch_size=1,
        signals=lambda batch: target_signals(target, batch, 1.0), target=target,
    )  # fmt: skip
    checked = 0
    for index, output in enumerate(outputs):
        matches = [table.greedy[table.sample == index].bool().tolist() for table in tables[:count]]
        place = 1
        for proposed, accepted in output.rounds[:-1]:  # the last one may end before its drafts do
            foretold = 0
            while foretold < proposed and matches[foretold][place + foretold]:
                foretold += 1
            assert accepted == foretold
            checked += accepted
            place += accepted + 1
    assert checked > 10


def test_accepted_drafts_by_hand() -> None:
    target = llama(0)
    outputs = decoder(target, eos=()).generate(requests(4, 10))
    tables = by_position(
        heads("eagle", target), target.lm_head.weight, text_of(requests(4, 10), outputs), temperature=1.0,
        batch_size=2, signals=lambda batch: target_signals(target, batch, 1.0), target=target,
    )  # fmt: skip
    assert len(tables) == 4 and all(len(table.sample) == 40 for table in tables)
    total = 0.0
    for sample in range(4):
        own = [table.sampled[table.sample == sample].tolist() for table in tables]
        for first in range(10):
            reach = 1.0
            for step in range(min(4, 10 - first)):
                reach *= own[step][first + step]
                total += reach
    assert accepted_drafts(tables, "sampled") == pytest.approx(total / 40, rel=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_rates_of_ranks_begin_with_the_acceptance_of_the_first_and_leave_nothing(
    kind: str, temperature: float
) -> None:
    target = llama(0)
    wanted = [
        request for request in requests(12, 12) if len(request.prompt) > 6
    ]  # all heads reach all tokens
    samples = text_of(wanted, decoder(target, eos=()).generate(wanted))
    signals = partial(target_signals, target, temperature=1.0)
    draft = heads(kind, target)
    tables = by_position(
        draft, target.lm_head.weight, samples, temperature=1.0, batch_size=2, signals=signals, target=target
    )
    rates = rank_rates(draft, target, samples, VOCAB, temperature=temperature, batch_size=2, signals=signals)
    assert len(rates) == len(tables) == 4
    measure = "argmax" if temperature else "greedy"
    for table, ranks in zip(tables, rates, strict=True):
        assert ranks[0] == pytest.approx(table.means()[measure], abs=1e-5) and sum(ranks) == pytest.approx(1)
        assert len(ranks) == VOCAB and max(ranks) < 1


def test_a_head_needs_the_target_and_a_model_has_one_table() -> None:
    target = llama(0)
    samples = text_of(requests(2, 6), decoder(target, eos=()).generate(requests(2, 6)))
    settings: Any = {
        "temperature": 1.0, "batch_size": 2, "signals": lambda batch: target_signals(target, batch, 1.0)
    }  # fmt: skip
    with pytest.raises(AssertionError, match="needs the target"):
        by_position(heads("medusa", target), target.lm_head.weight, samples, **settings)
    (table,) = by_position(DraftModel(llama(5)), target.lm_head.weight, samples, **settings)
    again = teacher_forced(DraftModel(llama(5)), target.lm_head.weight, samples, **settings)
    assert torch.equal(table.sampled, again.sampled)


def test_feature_layers_are_low_middle_and_high() -> None:
    assert feature_layers(32) == [2, 16, 29] and feature_layers(30) == [2, 15, 27]
    for depth in range(1, 8):
        low, middle, high = feature_layers(depth)
        assert 0 <= low <= middle <= high < depth


def test_kinds_are_told_apart_by_their_config() -> None:
    target = llama(0)
    kinds = [kind_of(model.config) for model in (target, *(heads(kind, target).model for kind in HEADS))]
    assert kinds == ["model", "medusa", "medusa", "eagle"]


def test_a_target_that_is_tapped_decodes_as_before() -> None:
    target = llama(0)
    runner = Runner(target, 4, 128)
    make_drafter(heads("eagle", target), runner, GREEDY)
    plain = Decoder(runner, eos_ids=(EOS,), options=GREEDY)
    assert tokens(plain.generate(requests())) == tokens(decoder(target).generate(requests()))
    with pytest.raises(AssertionError, match="same layers"):
        runner.tap((0, 0, 1))
