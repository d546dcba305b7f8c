"""Trees grown by every kind of drafter: the text stays plain decoding's, a node is as likely as a chain along
its path would find it, and what is proposed is what pays."""

import itertools
from typing import Any

import pytest
import torch

from evaluation.decoder import tree_drafter
from evaluation.decoder.drafters import Draft, DraftModel, DraftState
from evaluation.decoder.engine import Request
from evaluation.decoder.kinds import make_drafter, make_tree_drafter
from evaluation.decoder.runner import Runner
from evaluation.decoder.sampling import SamplingOptions
from evaluation.decoder.tree import DraftTree
from evaluation.decoder.tree_drafter import Candidates, Frontier, TreeDrafter, chosen
from tests.evaluation.decoder.decoders import GREEDY, decoder, requests, tokens
from tests.evaluation.decoder.test_engine import PENALISED
from tests.evaluation.decoder.test_engine_law import TARGET, law_p_value
from tests.evaluation.decoder.test_stop import TOKENIZER
from tests.evaluation.decoder.tiny_models import HEADS, VOCAB, heads, llama, relative
from tests.evaluation.decoder.trees import prices, tree_decoder

KINDS = ("model", "reduced", *HEADS, "static")
KIND = pytest.mark.parametrize("kind", KINDS)
RATES = [[0.5 / (rank + 1) / (step + 1) for rank in range(6)] for step in range(4)]
THIRD = torch.arange(0, VOCAB, 3)
SAMPLED = SamplingOptions(1.0)


def draft_of(kind: str, target: Any) -> DraftModel:
    if kind in ("model", "reduced"):
        model = relative(target)
        if kind == "model":
            return DraftModel(model)
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight[THIRD].detach())
        return DraftModel(model, THIRD)
    return heads("medusa" if kind == "static" else kind, target)


def trees(kind: str, target: Any, count: int = 4, batch: int = 4, options: Any = GREEDY, **settings: Any):
    """A decoder whose drafter of a kind grows trees that go on from several nodes of a level."""
    rates = RATES if kind == "static" else None
    settings = {"node": 0.02, "stop_below": 0.05, "rates": rates, **settings}
    return tree_decoder(target, draft_of(kind, target), count, batch, options, **settings)


@pytest.fixture
def widths(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """How many nodes of a level were gone on from."""
    seen: set[int] = set()

    class Watched(Frontier):
        def __init__(self, *parts: torch.Tensor) -> None:
            super().__init__(*parts)
            seen.add(self.ancestors.shape[1])

    monkeypatch.setattr(tree_drafter, "Frontier", Watched)
    return seen


@KIND
@pytest.mark.parametrize(("count", "batch", "options"), [(4, 8, GREEDY), (2, 1, GREEDY), (3, 4, PENALISED)])
def test_speculative_greedy_equals_plain(
    kind: str, count: int, batch: int, options: SamplingOptions, widths: set[int]
) -> None:
    """In ragged batches whose rows end and are refilled, with penalties too."""
    target, wanted = llama(0), requests(8)
    wanted[2] = Request(wanted[2].prompt, 3, seed=2)
    plain = decoder(target, batch=8, options=options).generate(wanted)
    engine = trees(kind, target, count, batch, options)
    assert tokens(engine.generate(wanted)) == tokens(plain)
    account = engine.account
    assert account.siblings > 0 and max(widths) > 1
    assert account.siblings / batch <= engine.columns_beside <= account.siblings  # of each round's widest row
    assert 0 < account.accepted < account.drafted and account.expected == {"match": account.accepted}


@KIND
def test_ends_and_stop_strings_inside_a_path(kind: str) -> None:
    target = llama(0)
    free = tokens(decoder(target, eos=()).generate(requests(8, 40)))
    text = [TOKENIZER.decode(answer, skip_special_tokens=False) for answer in free]
    settings = {"stop_strings": [text[0][9:12], text[1][20:22]], "tokenizer": TOKENIZER, "eos": (7, 11)}
    plain = decoder(target, **settings).generate(requests(8, 40))
    outputs = trees(kind, target, 4, **settings).generate(requests(8, 40))
    assert tokens(outputs) == tokens(plain)
    assert [o.finish_reason for o in outputs] == [o.finish_reason for o in plain]
    assert [o.finish_reason for o in plain].count("stop") > 3


@KIND
@pytest.mark.parametrize("new", [1, 2, 6])
def test_prompts_up_to_the_last_position(kind: str, new: int) -> None:
    target = llama(0, max_position_embeddings=64)
    wanted = [Request([i % VOCAB for i in range(64 - new + 1)], new, 0), Request([3, 4, 5], 12, 1)]
    plain = decoder(target, batch=2, length=64, eos=()).generate(wanted)
    assert tokens(trees(kind, target, 4, 2, length=64, eos=()).generate(wanted)) == tokens(plain)


def test_a_drafter_with_a_shorter_context_stops_drafting_and_decoding_goes_on() -> None:
    target = llama(0)
    wanted = [Request([3, 4, 5], 90), Request(list(range(40)), 30), Request(list(range(5, 48)) * 2, 20)]
    draft = DraftModel(llama(0, max_position_embeddings=50))
    engine = tree_decoder(target, draft, 4, 3, eos=(), node=0.001, stop_below=0.0)
    outputs = engine.generate(wanted)
    assert tokens(outputs) == tokens(decoder(target, batch=3, eos=()).generate(wanted))
    first, _, third = (output.rounds for output in outputs)
    assert first[0][0] > 1 and first[-1][0] == 0 and not any(proposed for proposed, _ in third)


@pytest.mark.parametrize(
    ("kind", "rule"),
    [*((kind, "block") for kind in KINDS), ("reduced", "shared_noise"), ("eagle", "shared_noise")],
)
def test_a_row_with_a_tree_does_not_depend_on_its_batch(kind: str, rule: str) -> None:
    target, wanted = llama(0), requests(5, 14)
    settings: dict[str, Any] = {"options": SAMPLED, "rule": rule}
    crowd = trees(kind, target, 4, 4, **settings).generate(wanted)
    alone = [trees(kind, target, 4, 1, **settings).generate([one])[0] for one in wanted]
    assert tokens(crowd) == tokens(alone)
    for name in ("rounds", "siblings"):
        assert [getattr(o, name) for o in crowd] == [getattr(o, name) for o in alone]
    if rule == "shared_noise":
        assert tokens(crowd) == tokens(decoder(target, **settings).generate(wanted))


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        ("static", "block"),
        *(pytest.param(kind, "block", marks=SLOW) for kind in ("model", "medusa", "eagle")),
        *(pytest.param(kind, "shared_noise", marks=SLOW) for kind in ("model", "medusa", "eagle")),
    ],
)
def test_answers_follow_the_targets_law(kind: str, rule: Any, widths: set[int]) -> None:
    """The joint law of three tokens of 8 ids (chi-square, as for chains)."""

    def change(engine: Any) -> None:
        engine.drafter = make_tree_drafter(
            draft_of(kind, TARGET), engine.runner, engine.options, prices(0.03, 8),
            RATES if kind == "static" else None, stop_below=0.05,
        )  # fmt: skip

    assert law_p_value(change=change, answer=24, rule=rule) > 1e-4
    assert max(widths) > 1


# How likely the nodes are.


def paths_of(grown: Candidates, row: int) -> list[tuple[list[int], float]]:
    """Every candidate of a row that a tree may have: the ids on the way to it, and its chance."""
    ids, parents, chances = (part[row].tolist() for part in (grown.ids, grown.parents, grown.chances))
    found: list[tuple[list[int], float]] = []
    for candidate, token in enumerate(ids):
        before = found[parents[candidate]][0] if parents[candidate] >= 0 else []
        found.append(([*before, token], chances[candidate]))
    return [path for path in found if path[1] > 0]


def chance_along(kind: str, target: Runner, state: DraftState, path: list[int]) -> float:
    """By a chain drafter that has read nothing yet and is led along the path."""
    drafter = make_drafter(draft_of(kind, llama(0)), target, GREEDY)
    drafter.lagging = True
    drafter.prepare(state, len(path))
    drafter.begin(state, len(path))
    chance = 1.0
    for step, token in enumerate(path):
        before = torch.tensor([path[step - 1]])
        logits = drafter.next(before, step, state) if step else drafter.first(state)
        index = token if drafter.vocab is None else drafter.vocab.tolist().index(token)
        chance *= float(logits.softmax(-1)[0, index])
    return chance


RIGHT = TreeDrafter.grow


def differences(kind: str, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Of the candidates' chances from those along their paths, over the rounds of two texts."""
    target, found, rounds = llama(0), [], itertools.count()

    def watched(self: TreeDrafter, state: DraftState, count: int) -> Candidates:
        grown = RIGHT(self, state, count)
        paths = paths_of(grown, 0)  # none in a row's last round
        if next(rounds) % 2 and paths:  # it takes its time
            deepest = max(paths, key=lambda path: (len(path[0]), path[1]))
            one = slice(0, 1)
            alone = DraftState(state.tokens[one], state.position[one], state.features[one], state.draws, None)
            found.append(abs(chance_along(kind, self.drafter.target, alone, deepest[0]) / deepest[1] - 1))
        return grown

    monkeypatch.setattr(TreeDrafter, "grow", watched)
    trees(kind, target, 4, 2, node=0.005, stop_below=0.02, most=16, eos=()).generate(requests(3, 40))
    return found


@pytest.mark.parametrize("kind", ["model", "reduced", "medusa", "eagle"])
def test_a_node_is_as_likely_as_a_chain_along_its_path_would_find_it(
    kind: str, monkeypatch: pytest.MonkeyPatch, widths: set[int]
) -> None:
    """After trees of several rounds: entries, features, positions and masks are those of the path."""
    found = differences(kind, monkeypatch)
    assert len(found) > 5 and max(found) < 1e-3 and max(widths) > 1


def all_seen(self: TreeDrafter, seen: torch.Tensor, position: torch.Tensor, depth: int) -> Frontier:
    right = FRONTIER_OF(self, seen, position, depth)
    return Frontier(torch.ones_like(seen), right.depths, right.places)


def nothing_read_again(self: Any, position: torch.Tensor, chained: int) -> None:
    self.known[: len(position)] = position + 4


FRONTIER_OF = TreeDrafter.frontier


@pytest.mark.parametrize("kind", ["model", "eagle"])
@pytest.mark.parametrize("mistake", ["cousins are seen", "stale entries are kept"])
def test_a_mistake_in_what_a_node_reads_shows(
    kind: str, mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mistake == "cousins are seen":
        monkeypatch.setattr(TreeDrafter, "frontier", all_seen)
    else:
        owner = type(make_drafter(draft_of(kind, llama(0)), Runner(llama(0), 1, 64), GREEDY))
        monkeypatch.setattr(owner, "settle", nothing_read_again)
    assert max(differences(kind, monkeypatch)) > 1e-2


def test_medusas_static_tree_is_the_same_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = set()

    def watched(self: TreeDrafter, state: DraftState, count: int) -> Draft:
        drawn = right(self, state, count)
        if isinstance(drawn, DraftTree) and min(state.left) >= 4:
            assert drawn.within.all() or self.rates is None
            shapes.update(map(tuple, drawn.parents.tolist()))
        return drawn

    right = TreeDrafter.draft
    monkeypatch.setattr(TreeDrafter, "draft", watched)
    trees("static", llama(0)).generate(requests())
    trees("medusa", llama(0)).generate(requests())
    assert len(shapes) > 5
    shapes.clear()
    trees("static", llama(0)).generate(requests())
    assert len(shapes) == 1


# What is proposed.


def candidates(*levels: list[tuple[int, float]]) -> Candidates:
    """One row of (parent, chance), level by level; ids are their numbers."""
    nodes = [node for level in levels for node in level]
    parents, chances = zip(*nodes, strict=True)
    return Candidates(
        torch.arange(len(nodes))[None],
        torch.tensor([chances], dtype=torch.float64),
        torch.tensor([parents]),
    )


def test_the_tree_is_the_one_that_brings_most_over_its_price() -> None:
    """Against every tree that there is, at prices that jump."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        first = torch.rand(3, generator=generator).softmax(0).tolist()
        second = [share * chance for chance in first[:2] for share in (0.6, 0.3)]
        grown = candidates([(-1, chance) for chance in first], [(0, second[0]), (0, second[1]),
                                                                (1, second[2]), (1, second[3])])  # fmt: skip
        cost = (torch.rand(5, generator=generator, dtype=torch.float64) * 0.4).cumsum(0)
        parents, chances = grown.parents[0].tolist(), grown.chances[0].tolist()
        best = max(
            sum(chances[node] for node in picked) - float(cost[len(picked) - 1])
            for size in range(1, 6)
            for picked in itertools.combinations(range(7), size)
            if all(parents[node] < 0 or parents[node] in picked for node in picked)
        )
        drawn = chosen(grown, cost)
        got = sum(chances[node] for node in drawn.ids[0].tolist())
        assert got - float(cost[drawn.ids.shape[1] - 1]) == pytest.approx(best)


def test_a_chain_is_proposed_where_no_sibling_pays_and_parents_come_first() -> None:
    grown = candidates([(-1, 0.6), (-1, 0.3), (-1, 0.1)], [(0, 0.5), (0, 0.05), (1, 0.2), (1, 0.1)])
    cheap = chosen(grown, torch.tensor(prices(0.15, 6)[1:]))
    assert isinstance(cheap, DraftTree)
    assert cheap.ids.tolist() == [[0, 1, 3, 5]] and cheap.parents.tolist() == [[0, 0, 1, 2]]
    dear = chosen(grown, torch.tensor(prices(0.35, 6)[1:]))
    assert not isinstance(dear, DraftTree) and dear.ids.tolist() == [[0, 3]]
    assert chosen(grown, torch.tensor(prices(0.9, 6)[1:])).ids.tolist() == [[0]]
    nothing = candidates([(-1, 0.0), (-1, 0.0)])
    assert chosen(nothing, torch.tensor(prices()[1:])).proposed.tolist() == [0]


def test_rows_of_one_batch_have_trees_of_their_own() -> None:
    sure, unsure = [0.9, 0.05, 0.8, 0.02], [0.5, 0.4, 0.1, 0.1]
    grown = Candidates(
        torch.arange(4).repeat(2, 1), torch.tensor([sure, unsure], dtype=torch.float64),
        torch.tensor([[-1, -1, 0, 0]] * 2),
    )  # fmt: skip
    drawn = chosen(grown, torch.tensor(prices(0.2, 4)[1:]))
    assert isinstance(drawn, DraftTree)
    assert drawn.ids.tolist() == [[0, 2], [0, 1]] and drawn.parents.tolist() == [[0, 1], [0, 0]]
