"""Trees in the whole decoder at temperature 0: the text is plain decoding's, whatever the tree."""

from types import SimpleNamespace

import pytest
import torch

from data.errors import UserError
from evaluation.decoder.cache import RaggedCache
from evaluation.decoder.engine import Request
from evaluation.decoder.guard import Guard
from evaluation.decoder.runner import Runner
from evaluation.decoder.sampling import SamplingOptions
from evaluation.decoder.synthetic import SyntheticDecoder
from tests.evaluation.decoder.decoders import GREEDY, decoder, requests, tokens
from tests.evaluation.decoder.test_engine import COSTS, PENALISED
from tests.evaluation.decoder.test_stop import TOKENIZER
from tests.evaluation.decoder.tiny_models import FAMILIES, VOCAB, family, llama, prompts
from tests.evaluation.decoder.trees import RandomTrees, tree, tree_decoder


def test_a_tree_knows_its_geometry() -> None:
    #     0
    #   1   2
    #  3 4   5
    #    6
    drawn = tree([(0, 7), (0, 8), (1, 9), (1, 7), (2, 7), (4, 5)], [(0, 1), (1, 2), (2, 3)])
    assert drawn.depths.tolist()[0] == [0, 1, 1, 2, 2, 2, 3]
    assert drawn.lengths.tolist() == [3, 3]
    paths = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 4], [0, 2, 5], [0, 1, 4, 6]]
    assert [row.nonzero()[:, 0].tolist() for row in drawn.ancestors[0]] == paths
    assert drawn.earlier_siblings[0].nonzero().tolist() == [[1, 0], [3, 2]]
    assert drawn.places[0].tolist() == [0, 1, 3, 2, 4, 5, 6]  # the first children's path is 0 1 3
    assert all(sorted(row) == list(range(7)) for row in drawn.places.tolist())
    drawn.limit(torch.tensor([2, 9]))
    assert drawn.proposed.tolist() == [5, 3] and drawn.lengths.tolist() == [2, 3]
    assert drawn.first(2).proposed.tolist() == [2, 2]


def random_trees(target, texts, count=4, batch=3, options=GREEDY, **settings):
    engine = decoder(target, "ngram", count, batch, options, **settings)
    engine.drafter = RandomTrees(texts)
    return engine


def texts_of(outputs, wanted) -> list[list[int]]:
    return [[*request.prompt, *output.tokens] for request, output in zip(wanted, outputs, strict=True)]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("options", [GREEDY, PENALISED], ids=["greedy", "penalised"])
def test_random_trees_change_no_token_of_ragged_batches(name: str, options: SamplingOptions) -> None:
    model, wanted = family(name), requests()
    plain = decoder(model, batch=3, options=options).generate(wanted)
    engine = random_trees(model, texts_of(plain, wanted), options=options)
    assert tokens(engine.generate(wanted)) == tokens(plain)
    account = engine.account
    assert account.accepted > 20 and account.siblings > 0 and account.stood[1] > 0
    assert account.expected == {"match": account.accepted}


RIGHT_MASK, RIGHT_FORWARD = Runner.mask, Runner.forward


def siblings_seen(self, slots, window, start, tree):
    return RIGHT_MASK(self, slots, window, start, None)


def columns_counted(self, ids, start, rows=None, tree=None, window=None):
    if tree is not None:
        columns = torch.arange(ids.shape[1]).expand(ids.shape)
        tree = SimpleNamespace(ancestors=tree.ancestors, places=tree.places, depths=columns)
    return RIGHT_FORWARD(self, ids, start, rows, tree, window)


@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [
        (RaggedCache, "keep", lambda self, rows, source, first: None),
        (Runner, "mask", siblings_seen),
        (Runner, "forward", columns_counted),
    ],
    ids=["entries are not moved", "siblings are seen", "positions count columns"],
)
def test_a_mistake_with_trees_changes_tokens(
    owner, name: str, wrong, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, wanted = llama(0), requests(8, 40)
    plain = decoder(target, batch=3).generate(wanted)
    monkeypatch.setattr(owner, name, wrong)
    assert tokens(random_trees(target, texts_of(plain, wanted)).generate(wanted)) != tokens(plain)


def test_hidden_states_along_a_path_equal_a_full_recompute() -> None:
    target, wanted = llama(0), requests()
    plain = decoder(target).generate(wanted)
    engine = random_trees(target, texts_of(plain, wanted), keep_states=True)
    for request, output in zip(wanted, engine.generate(wanted), strict=True):
        count = len(output.tokens)
        hidden = torch.cat(output.states.hidden)[:count]
        summary = torch.cat(output.states.logits_summary)[:count]
        with torch.inference_mode():
            logits = target(torch.tensor([[*request.prompt, *output.tokens]])).logits[0]
        logits = logits[len(request.prompt) - 1 : -1]
        assert torch.allclose(target.lm_head(hidden), logits, atol=2e-4)
        assert torch.allclose(summary[:, 0].float(), logits.logsumexp(-1), atol=2e-4)
        assert summary[:, 1].long().tolist() == output.tokens


@pytest.mark.parametrize("new", [1, 2, 5])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_trees_at_the_last_positions(name: str, new: int) -> None:
    model = family(name)
    limit = model.config.max_position_embeddings
    wanted = [Request([i % VOCAB for i in range(limit + 1 - new)], new, 0), Request([3, 4, 5], 12, 1)]
    plain = decoder(model, batch=2, length=limit, eos=()).generate(wanted)
    engine = random_trees(model, texts_of(plain, wanted), batch=2, length=limit, eos=())
    assert tokens(engine.generate(wanted)) == tokens(plain)


def test_a_drafter_reads_again_what_was_not_accepted_of_it_before_a_pause() -> None:
    """The target as its own drafter, cut after one token each round, paused now and then: entries of tokens
    that were cut off must not stay in its cache.
    """

    class Stubborn(Guard):
        rounds = 0

        @property
        def drafts(self) -> bool:
            return self.rounds % 5 in (0, 1)

        def record(self, steps: int, siblings: int, emitted: float) -> None:
            self.rounds += 1

    target = llama(0)
    engine = decoder(target, target, 4, 2, eos=(), guard=Stubborn(COSTS))
    judge, found = engine.judge, []

    def cut(logits, draft, draws, prefix):
        verdict = judge(logits, draft, draws, prefix)
        found.append((verdict.accepted - draft.proposed).tolist())
        verdict.accepted = verdict.accepted.clamp(max=1)
        verdict.token = logits.argmax(-1).gather(1, verdict.accepted[:, None])[:, 0]
        other = (verdict.token + 1) % VOCAB  # a text that the drafter did not foresee
        verdict.token = torch.where(draft.proposed > 1, other, verdict.token)
        return verdict

    engine.judge = cut
    engine.generate([Request(prompt, 60, seed=i) for i, prompt in enumerate(prompts(2))])
    assert len(found) > 20 and not any(gap for row in found for gap in row)


@pytest.mark.parametrize("count", [2, 5])
def test_ends_and_stop_strings_inside_a_path(count: int) -> None:
    target = llama(0)
    free = tokens(decoder(target, eos=()).generate(requests(8, 40)))
    text = [TOKENIZER.decode(answer, skip_special_tokens=False) for answer in free]
    settings = {"stop_strings": [text[0][9:12], text[1][20:22]], "tokenizer": TOKENIZER, "eos": (7, 11)}
    plain = decoder(target, **settings).generate(requests(8, 40))
    outputs = random_trees(target, texts_of(plain, requests(8, 40)), count, **settings).generate(
        requests(8, 40)
    )
    assert tokens(outputs) == tokens(plain)
    assert [o.finish_reason for o in outputs] == [o.finish_reason for o in plain]


def test_the_guard_counts_siblings_at_their_own_cost() -> None:
    wider = [0.0, 0.1, 0.3, 0.3, 0.3, 0.4, 0.8, 0.8, 0.8, 0.9, 1.0]
    guard = Guard([1.0, 1.5, 2.0], wider)
    assert guard.cost(2, 3) == pytest.approx(2.1) and guard.cost(2, 0) == 2 and guard.cost(0, 0) == 1
    target = llama(0)
    engine = tree_decoder(target, llama(5), 4, 3, eos=(), guard=Guard(COSTS, wider))
    wanted = [Request(prompt, 100, seed=i) for i, prompt in enumerate(prompts(6))]
    outputs = engine.generate(wanted)
    assert tokens(outputs) == tokens(decoder(target, batch=3, eos=()).generate(wanted))
    assert sum(proposed == 0 for output in outputs for proposed, _ in output.rounds) > 100


def test_synthetic_acceptance_refuses_trees() -> None:
    engine = tree_decoder(llama(0), llama(0), kind=SyntheticDecoder, conditional_acceptance=[0.5] * 4)
    with pytest.raises(UserError, match="no trees"):
        engine.generate(requests())
