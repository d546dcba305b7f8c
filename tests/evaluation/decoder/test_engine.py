"""The whole decoder on random tiny models at temperature 0, and where answers end."""

import pytest
import torch

from data.errors import UserError
from evaluation.decoder.engine import Request, common_prefix
from evaluation.decoder.guard import Guard
from evaluation.decoder.ngram import NgramDrafter
from evaluation.decoder.sampling import SamplingOptions
from tests.evaluation.decoder.decoders import EOS, GREEDY, decoder, requests, tokens
from tests.evaluation.decoder.test_stop import TOKENIZER
from tests.evaluation.decoder.tiny_models import FAMILIES, VOCAB, family, llama, prompts, relative

PENALISED = SamplingOptions(
    repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3, logit_bias={3: -1.0, 5: 1.0}
)


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_decoding_agrees_with_transformers_plain_and_assisted(name: str) -> None:
    model = family(name)
    assistant = relative(model)
    plain = decoder(model, batch=3).generate(requests())
    speculative = decoder(model, assistant, 4, batch=3).generate(requests())
    for request, ours, drafted in zip(requests(), plain, speculative, strict=True):
        prompt = torch.tensor([request.prompt])
        settings = {
            "attention_mask": torch.ones_like(prompt), "max_new_tokens": 24, "do_sample": False,
            "eos_token_id": EOS, "pad_token_id": 0,
        }  # fmt: skip
        theirs = model.generate(prompt, **settings)[0, len(request.prompt) :].tolist()
        assisted = model.generate(prompt, assistant_model=assistant, **settings)
        assert ours.tokens == drafted.tokens == theirs
        assert assisted[0, len(request.prompt) :].tolist() == theirs
        assert ours.finish_reason == ("stop" if EOS in theirs else "length")


def drafting_model(kind: str, target):
    """A drafter's model and vocabulary: another model, one near the target, itself, its head cut, look-up."""
    if kind != "reduced":
        models = {"other": llama(5), "relative": relative(target), "ngram": "ngram", "self": target}
        return models[kind], None
    model, vocab = llama(6), torch.arange(0, VOCAB, 3)
    model.lm_head.weight = torch.nn.Parameter(target.lm_head.weight[vocab].detach())
    return model, vocab


@pytest.mark.parametrize(
    ("count", "options"), [*((count, GREEDY) for count in range(1, 9)), (2, PENALISED), (5, PENALISED)]
)
@pytest.mark.parametrize("kind", ["other", "relative", "ngram", "self", "reduced"])
def test_speculative_greedy_equals_plain(kind: str, count: int, options: SamplingOptions) -> None:
    target = llama(0)
    model, vocab = drafting_model(kind, target)
    plain = decoder(target, batch=8, options=options).generate(requests())
    engine = decoder(target, model, count, 8, options, vocab)
    assert tokens(engine.generate(requests())) == tokens(plain)
    account = engine.account
    assert account.expected == {"match": account.accepted}
    if kind == "self":
        assert account.accepted == account.drafted > 0
    else:
        assert account.accepted < account.drafted  # the drafter is really another one
    if kind == "relative":
        assert 0.3 < account.conditional_acceptance[0] < 0.95


@pytest.mark.parametrize("draft", [None, "ngram"])
def test_progress_hears_every_token_once(draft: str | None) -> None:
    heard: list[int] = []
    engine = decoder(llama(0), draft, 3, batch=3) if draft else decoder(llama(0), batch=3)
    outputs = engine.generate(requests(), heard.append)
    assert sum(heard) == sum(len(output) for output in tokens(outputs)) > len(outputs)


def test_penalties_and_bias_change_the_answer() -> None:
    plain = tokens(decoder(llama(0)).generate(requests()))
    for change in ({"repetition_penalty": 1.3}, {"presence_penalty": 2.0}, {"frequency_penalty": 1.0}):
        assert tokens(decoder(llama(0), options=SamplingOptions(**change)).generate(requests())) != plain
    banned = SamplingOptions(logit_bias={plain[0][0]: -100.0})
    outputs = decoder(llama(0), "ngram", 3, options=banned).generate(requests())
    assert all(plain[0][0] not in output for output in tokens(outputs))


def test_repetition_penalty_is_transformers_throughout_an_answer() -> None:
    model = llama(0)
    options = SamplingOptions(repetition_penalty=1.4)
    outputs = decoder(model, llama(5), 4, options=options).generate(requests())
    for request, output in zip(requests(), outputs, strict=True):
        prompt = torch.tensor([request.prompt])
        theirs = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24, do_sample=False,
            eos_token_id=EOS, pad_token_id=0, repetition_penalty=1.4,
        )  # fmt: skip
        assert output.tokens == theirs[0, len(request.prompt) :].tolist()


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


@pytest.mark.parametrize("eos", [(EOS,), (EOS, 11, 30)])
def test_nothing_follows_an_end_inside_an_accepted_block(eos: tuple[int, ...]) -> None:
    target = llama(0)
    engine = decoder(target, target, 8, eos=eos)
    outputs = engine.generate(requests(16, 48))
    stopped = [output for output in outputs if output.finish_reason == "stop"]
    assert {output.tokens[-1] for output in stopped} == set(eos), "an end that no row meets proves nothing"
    assert all(not set(eos) & set(output.tokens[:-1]) for output in outputs)
    assert any(output.truncated for output in stopped) and engine.account.truncated > 0
    assert tokens(outputs) == tokens(decoder(target, eos=eos).generate(requests(16, 48)))


class AlwaysEnds(NgramDrafter):
    def look_up(self, tokens: list[int], count: int) -> list[int]:
        return [EOS] * count


def test_an_end_that_only_the_draft_wants_ends_nothing() -> None:
    engine = decoder(llama(0), "ngram", 3)
    engine.drafter = AlwaysEnds()
    assert tokens(engine.generate(requests())) == tokens(decoder(llama(0)).generate(requests()))


@pytest.mark.parametrize("count", [1, 2, 4, 7])
def test_stop_strings_end_speculative_and_plain_answers_alike(count: int) -> None:
    target = llama(0)
    free = tokens(decoder(target, eos=()).generate(requests(8, 40)))
    text = [TOKENIZER.decode(answer, skip_special_tokens=False) for answer in free]
    strings = [text[0][9:12], text[1][20:22]]  # over tokens, wherever rounds end
    settings = {"stop_strings": strings, "tokenizer": TOKENIZER}
    plain = decoder(target, eos=(), **settings).generate(requests(8, 40))
    assert [output.finish_reason for output in plain].count("stop") >= 2
    for output, full, whole in zip(plain, free, text, strict=True):
        ends = [whole.find(string) + len(string) for string in strings if string in whole]
        wanted = min(ends, default=len(whole))  # one token, one character in this vocabulary
        assert output.tokens == full[:wanted]
    speculative = decoder(target, target, count, eos=(), **settings).generate(requests(8, 40))
    assert tokens(speculative) == tokens(plain)
    assert [o.finish_reason for o in speculative] == [o.finish_reason for o in plain]


@pytest.mark.parametrize("name", ["llama", "gpt2"])  # rotary positions, and a table of them that ends
@pytest.mark.parametrize("new", [1, 2, 6])
def test_prompts_up_to_the_last_position(name: str, new: int) -> None:
    model = family(name)
    limit = model.config.max_position_embeddings
    long = [i % VOCAB for i in range(limit + 1 - new)]
    wanted = [Request(long, new), Request([3, 4, 5], 12)]
    plain = decoder(model, batch=2, length=limit, eos=()).generate(wanted)
    assert [len(answer) for answer in tokens(plain)] == [new, 12]
    engine = decoder(model, model, 4, batch=2, length=limit, eos=())
    assert tokens(engine.generate(wanted)) == tokens(plain)
    with pytest.raises(UserError, match="positions"):
        engine.generate([Request([1, *long], new)])


@pytest.mark.parametrize("short", ["llama", "gpt2"])
def test_a_drafter_with_a_shorter_context_stops_drafting_and_decoding_goes_on(short: str) -> None:
    target = llama(0)
    config = {"max_position_embeddings": 50} if short == "llama" else {"n_positions": 50}
    draft = llama(0, **config) if short == "llama" else family("gpt2", **config)
    wanted = [Request([3, 4, 5], 90), Request(list(range(40)), 30), Request(list(range(5, 48)) * 2, 20)]
    plain = decoder(target, batch=3, eos=()).generate(wanted)
    outputs = decoder(target, draft, 4, batch=3, eos=()).generate(wanted)
    assert tokens(outputs) == tokens(plain)
    first, second, third = (output.rounds for output in outputs)
    assert first[0][0] == 4 and first[-1][0] == 0
    assert second[0][0] > 0 and not any(proposed for proposed, _ in third)


def test_a_row_does_not_depend_on_its_batch() -> None:
    target, wanted = llama(0), requests()
    for model, count in ((None, 0), (relative(target), 4)):
        crowd = decoder(target, model, count, batch=8).generate(wanted)
        alone = [decoder(target, model, count, batch=1).generate([one])[0] for one in wanted]
        assert tokens(crowd) == tokens(alone)
        assert [output.rounds for output in crowd] == [output.rounds for output in alone]


def test_a_shared_prefix_is_read_once_and_changes_nothing() -> None:
    assert common_prefix([[1, 2, 3], [1, 2, 4]]) == 2
    assert common_prefix([[1, 2], [1, 2]]) == 1
    assert common_prefix([[1, 2]]) == 0
    head = [5, 6, 8, 9, 10, 11]
    wanted = [Request([*head, *request.prompt], 16) for request in requests()]
    target = llama(0)
    alone = [decoder(target, batch=1).generate([request])[0] for request in wanted]
    assert tokens(decoder(target, batch=3).generate(wanted)) == tokens(alone)


def test_prompts_that_begin_together_are_read_in_one_forward_and_end_at_once_where_they_do() -> None:
    wanted = requests(6)
    plain = decoder(llama(0), batch=1, eos=()).generate(wanted)
    ending = plain[2].tokens[0]  # an answer of one token: its slot is taken by another row
    alone = decoder(llama(0), batch=1, eos=(ending,)).generate(wanted)
    engine = decoder(llama(0), batch=4, eos=(ending,))
    widths = []
    forward = engine.runner.forward

    def counted(ids, *rest, **more):
        widths.append(tuple(ids.shape))
        return forward(ids, *rest, **more)

    engine.runner.forward = counted
    together = engine.generate(wanted)
    assert tokens(together) == tokens(alone)
    assert len(together[2].tokens) == 1
    assert widths[0] == (4, max(len(request.prompt) for request in wanted[:4]))


def test_a_drafter_that_stops_early_proposes_less_and_changes_nothing_else() -> None:
    engine = decoder(llama(0), relative(llama(0)), 5, stop_below=0.5)
    outputs = engine.generate(requests())
    proposed = {p for output in outputs for p, _ in output.rounds}
    assert min(proposed) < 5 and max(proposed) > 1
    assert tokens(outputs) == tokens(decoder(llama(0)).generate(requests()))


COSTS = [1.0, 1.4, 1.7, 2.0, 2.3]


@pytest.mark.parametrize("kind", ["other", "self", "ngram", "reduced"])
def test_the_guard_changes_no_token_and_pauses_what_does_not_pay(kind: str) -> None:
    target = llama(0)
    model, vocab = drafting_model(kind, target)
    wanted = [Request(prompt, 100, seed=i) for i, prompt in enumerate(prompts(6))]
    engine = decoder(target, model, 4, 3, vocab=vocab, eos=(), guard=Guard(COSTS))
    outputs = engine.generate(wanted)
    assert tokens(outputs) == tokens(decoder(target, batch=3, eos=()).generate(wanted))
    paused = sum(proposed == 0 for output in outputs for proposed, _ in output.rounds)
    if kind == "self":
        assert engine.account.accepted == engine.account.drafted > 400 and paused < 10
    if kind in ("other", "reduced"):
        assert engine.account.rounds / 2 < paused < engine.account.rounds


def test_a_drafter_reads_what_it_missed_while_it_was_paused() -> None:
    """The target as its own drafter, paused for stretches: one wrong cache entry would be a rejection."""

    class Stubborn(Guard):
        @property
        def drafts(self) -> bool:
            return self.rounds % 9 in (0, 5, 6)

        def record(self, steps: int, siblings: int, emitted: float) -> None:
            self.rounds += 1

    guard = Stubborn(COSTS)
    guard.rounds = 0
    target = llama(0)
    outputs = decoder(target, target, 3, 3, eos=(), guard=guard).generate(requests(7, 60))
    rounds = [pair for output in outputs for pair in output.rounds]
    assert all(proposed == accepted for proposed, accepted in rounds)
    assert {proposed for proposed, _ in rounds} >= {0, 3}


def test_a_guard_must_know_the_costs_of_every_number_of_drafts() -> None:
    with pytest.raises(UserError, match="up to 4 drafts"):
        decoder(llama(0), llama(5), 5, guard=Guard(COSTS))


@pytest.mark.parametrize("options", [GREEDY, SamplingOptions(1.0)], ids=["greedy", "sampled"])
def test_logits_after_accepts_and_rollbacks_equal_a_full_recompute(options: SamplingOptions) -> None:
    target, wanted = llama(0), requests()
    engine = decoder(target, relative(target), 3, options=options, keep_states=True)
    for request, output in zip(wanted, engine.generate(wanted), strict=True):
        count = len(output.tokens)
        hidden = torch.cat(output.states.hidden)[:count]
        summary = torch.cat(output.states.logits_summary)[:count]
        with torch.inference_mode():
            logits = target(torch.tensor([[*request.prompt, *output.tokens]])).logits[
                0, len(request.prompt) - 1 : -1
            ]
        assert torch.allclose(target.lm_head(hidden), logits, atol=2e-4)
        assert torch.allclose(summary[:, 0].float(), logits.logsumexp(-1), atol=2e-4)
        if options.greedy:
            assert summary[:, 1].long().tolist() == output.tokens
    assert 0 < engine.account.accepted < engine.account.drafted


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
