"""A round is a function of fixed shape over buffers: it can be captured, and be read late."""

from functools import partial

import pytest
import torch

from evaluation.decoder.engine import Decoder, Output, Request
from evaluation.decoder.graphs import Graphs
from evaluation.decoder.guard import Guard
from evaluation.decoder.kinds import make_drafter
from evaluation.decoder.sampling import SamplingOptions
from evaluation.decoder.synthetic import SyntheticDecoder
from tests.evaluation.decoder.decoders import EOS, GREEDY, decoder, requests, tokens
from tests.evaluation.decoder.tapes import Tapes
from tests.evaluation.decoder.test_engine import drafting_model
from tests.evaluation.decoder.test_heads import heads
from tests.evaluation.decoder.test_stop import TOKENIZER
from tests.evaluation.decoder.tiny_models import VOCAB, family, llama, relative
from tests.evaluation.decoder.trees import tree_decoder

SAMPLED = SamplingOptions(1.0)
PENALISED = SamplingOptions(1.2, top_p=0.9, top_k=20, repetition_penalty=1.3, logit_bias={3: -1.0})
TARGET = llama(0)


def late(engine: Decoder, lag: int = 1) -> Decoder:
    """The decoder as it is on a GPU, with tapes for graphs."""
    engine.graphs = Tapes()  # type: ignore[assignment]
    engine.lag = lag
    return engine


def same(first: list[Output], second: list[Output]) -> None:
    assert tokens(first) == tokens(second)
    for one, other in zip(first, second, strict=True):
        assert (one.finish_reason, one.truncated) == (other.finish_reason, other.truncated)
        # Late, the last round of a row is not known to be one of no drafts; it proposes none all the same.
        assert one.rounds == other.rounds


def medusa(engine: Decoder) -> Decoder:
    engine.drafter = make_drafter(heads("medusa", TARGET), engine.runner, engine.options)
    return engine


def reduced() -> Decoder:
    model, vocab = drafting_model("reduced", TARGET)
    return decoder(TARGET, model, 3, options=SAMPLED, vocab=vocab)


WAYS = {
    "plain": lambda: decoder(TARGET),
    "plain sampled": lambda: decoder(TARGET, options=PENALISED),
    "greedy": lambda: decoder(TARGET, relative(TARGET), 3),
    "block": lambda: decoder(TARGET, relative(TARGET), 3, options=SAMPLED),
    "token": lambda: decoder(TARGET, relative(TARGET), 3, options=PENALISED, rule="token"),
    "shared noise": lambda: decoder(TARGET, relative(TARGET), 2, options=SAMPLED, rule="shared_noise"),
    "argmax": lambda: decoder(TARGET, relative(TARGET), 4, options=SAMPLED, argmax=True),
    "reduced": reduced,
    "gpt2": lambda: decoder(family("gpt2"), relative(family("gpt2")), 3),
    "medusa": lambda: medusa(decoder(TARGET, TARGET, 2)),
    "states": lambda: decoder(TARGET, relative(TARGET), 3, keep_states=True),
}


@pytest.mark.parametrize("way", WAYS)
def test_replayed_rounds_are_those_that_python_plays(way: str) -> None:
    wanted = requests(6, 18)
    eager = WAYS[way]()
    outputs = eager.generate(wanted)
    captured = late(WAYS[way]())
    replayed = captured.generate(wanted)
    same(replayed, outputs)
    assert captured.account.expected == pytest.approx(eager.account.expected)
    assert captured.graphs.replays > 5  # type: ignore[union-attr]
    if way == "states":
        for one, other in zip(replayed, outputs, strict=True):
            for name in ("hidden", "logits_summary"):
                kept, played = (torch.cat(getattr(each.states, name)) for each in (one, other))
                assert torch.allclose(kept, played, atol=1e-5)


@pytest.mark.parametrize("lag", [1, 3])
@pytest.mark.parametrize("new", [1, 2, 4, 24])
def test_reading_late_changes_no_answer(lag: int, new: int) -> None:
    for options in (GREEDY, SAMPLED):
        make = partial(decoder, TARGET, relative(TARGET), 3, options=options, eos=(EOS, 11, 30))
        engine = make()
        engine.lag = lag
        same(engine.generate(requests(6, new)), make().generate(requests(6, new)))


def test_stop_strings_and_ends_that_are_found_late() -> None:
    free = tokens(decoder(TARGET, eos=()).generate(requests(6, 30)))
    string = TOKENIZER.decode(free[0], skip_special_tokens=False)[9:12]
    make = partial(decoder, TARGET, TARGET, 4, eos=(EOS,), stop_strings=[string], tokenizer=TOKENIZER)
    outputs = make().generate(requests(6, 30))
    assert [output.finish_reason for output in outputs].count("stop") >= 2
    same(late(make(), lag=2).generate(requests(6, 30)), outputs)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_late_rounds_stay_inside_the_context(name: str) -> None:
    model = family(name)
    limit = model.config.max_position_embeddings
    wanted = [Request([i % VOCAB for i in range(limit + 1 - new)], new) for new in (1, 2, 9)]
    wanted.append(Request([3, 4, 5], 30))
    make = partial(decoder, model, model, 4, batch=3, length=limit, eos=())
    # When a row begins, and so whose end shortens its rounds, depends on when the last end was read.
    assert tokens(late(make(), lag=2).generate(wanted)) == tokens(make().generate(wanted))


def test_a_shorter_context_of_the_drafter_needs_no_look_at_the_rows() -> None:
    wanted = [Request([3, 4, 5], 60), Request(list(range(40)), 20), Request(list(range(5, 48)) * 2, 12)]
    engine = late(decoder(TARGET, llama(0, max_position_embeddings=50), 4, batch=3, eos=()))
    engine.drafter.watches = False
    outputs = engine.generate(wanted)
    assert tokens(outputs) == tokens(decoder(TARGET, batch=3, eos=()).generate(wanted))
    first, second, third = (output.rounds for output in outputs)
    assert first[0][0] == 4 and first[-1][0] == 0
    assert second[0][0] > 0 and not any(proposed for proposed, _ in third)


def test_drafts_that_end_early_shorten_the_rounds_after_them() -> None:
    engine = late(decoder(TARGET, relative(TARGET, 0.3), 6, stop_below=0.5, eos=()))
    engine.drafter.watches = False
    outputs = engine.generate(requests(4, 40))
    assert tokens(outputs) == tokens(decoder(TARGET, eos=()).generate(requests(4, 40)))
    counts = {count for _, count, _ in engine.graphs.seen}  # type: ignore[union-attr]
    assert min(counts) < 6 and len(counts) > 2
    assert engine.account.drafted < 6 * engine.account.rounds


def test_the_guard_hears_of_rounds_late() -> None:
    wanted = requests(3, 60)
    make = partial(decoder, TARGET, llama(5), 3, 3, eos=())
    engine = late(make(guard=Guard([1.0, 1.4, 1.7, 2.0])))
    assert tokens(engine.generate(wanted)) == tokens(make().generate(wanted))
    assert engine.account.drafted < 3 * engine.account.rounds / 2


def test_synthetic_rounds_can_be_captured() -> None:
    make = partial(
        decoder, TARGET, llama(5), 3, kind=SyntheticDecoder, conditional_acceptance=[0.8, 0.6, 0.5]
    )
    same(late(make()).generate(requests(4, 24)), make().generate(requests(4, 24)))


@pytest.mark.parametrize("kind", ["early end", "tree", "eagle"])
def test_what_cannot_be_captured_is_found_and_says_so(kind: str) -> None:
    """Controls of the tapes: each of these looks at numbers in a round."""
    if kind == "early end":
        engine = decoder(TARGET, relative(TARGET), 4, stop_below=0.3, eos=())
        assert engine.drafter.watches  # on a CPU; the drafter of a GPU does not look
    elif kind == "tree":
        engine = tree_decoder(TARGET, relative(TARGET), 4, 3, eos=())
        assert not engine.drafter.capturable
    else:
        engine = decoder(TARGET, TARGET, 3, eos=())
        engine.drafter = make_drafter(heads("eagle", TARGET), engine.runner, GREEDY)
        assert not engine.drafter.capturable
    with pytest.raises(AssertionError, match="the host reads"):
        late(engine, lag=0).generate(requests(4, 40))


def test_a_round_that_python_decides_is_not_the_replayed_one() -> None:
    """Control: a drafter that counts its steps in Python, as no buffer does."""

    def counting(engine: Decoder) -> Decoder:
        choose, steps = engine.drafter.choose, iter(range(10**6))

        def odd(logits: torch.Tensor, draws: object, step: int) -> tuple[torch.Tensor, ...]:
            token, *rest = choose(logits, draws, step)
            return (token + next(steps) % 2) % VOCAB, *rest

        engine.drafter.choose = odd
        return engine

    make = partial(decoder, TARGET, relative(TARGET), 3, eos=())
    eager = counting(make()).generate(requests(4, 40))
    replayed = late(counting(make())).generate(requests(4, 40))
    assert tokens(eager) == tokens(replayed)  # greedy: whatever is drafted
    assert [output.rounds for output in eager] != [output.rounds for output in replayed]


class Watched(Graphs):
    """CUDA graphs whose replays may not stop the stream."""

    replays = 0

    def __call__(self, key, function):
        replaying = key in self.graphs
        self.replays += replaying
        torch.cuda.set_sync_debug_mode("error" if replaying else "default")
        try:
            return super().__call__(key, function)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("options", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])
@pytest.mark.parametrize("count", [0, 3])
def test_captured_rounds_on_a_gpu_are_the_eager_ones(count: int, options: SamplingOptions) -> None:
    target = llama(0).cuda()
    make = partial(decoder, target, relative(target) if count else None, count, options=options)
    eager = make()
    eager.graphs, eager.lag = None, 0
    outputs = eager.generate(requests(7, 40))
    engine = make()
    engine.graphs = Watched()
    same(engine.generate(requests(7, 40)), outputs)
    assert engine.lag == 1 and engine.graphs.replays > 20
    on_cpu = decoder(llama(0), relative(llama(0)) if count else None, count, options=options)
    agree = [a == b for a, b in zip(tokens(on_cpu.generate(requests(7, 40))), tokens(outputs), strict=True)]
    assert sum(agree) >= 5  # another device rounds elsewhere
