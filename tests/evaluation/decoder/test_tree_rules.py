"""Losslessness of trees by exact enumeration of the functions that the engine calls, in float64 and beside a
twin in fractions, and by the joint law of the whole decoder; with controls that fail.
"""

import itertools
from fractions import Fraction

import pytest
import torch

from evaluation.decoder import tree_rules
from evaluation.decoder.drafters import DraftModel
from evaluation.decoder.kinds import make_tree_drafter
from evaluation.decoder.sampling import SamplingOptions
from evaluation.decoder.tree import DraftTree
from tests.evaluation.decoder.decoders import decoder, requests, tokens
from tests.evaluation.decoder.small_laws import Context, SmallLaw
from tests.evaluation.decoder.test_engine_law import DRAFT, SAMPLED, law_p_value
from tests.evaluation.decoder.tiny_models import llama, relative
from tests.evaluation.decoder.trees import prices, tree, tree_decoder

DEPTH = 2
SIZES = (2, 3)


def ranked(draft: SmallLaw, context: Context) -> list[int]:
    """Ids after a context, the draft's most likely first."""
    probs = draft.table[context]
    return sorted(range(draft.size), key=lambda token: -probs[token])


def grown(
    draft: SmallLaw, widths: tuple[int, ...], size: int | None = None
) -> tuple[DraftTree, list[Context]]:
    """The tree of the draft's most likely children, `widths[r]` of the r-th most likely node of a depth, and
    the text of every column; of which the first `size` nodes are proposed.
    """
    nodes, texts, level = [], [()], [0]
    for _ in range(DEPTH):
        first = len(nodes)
        for rank, parent in enumerate(level):
            for token in ranked(draft, texts[parent])[: widths[min(rank, len(widths) - 1)]]:
                nodes.append((parent, token))
                texts.append((*texts[parent], token))
        level = list(range(first + 1, len(nodes) + 1))
    return tree(nodes, proposed=[len(nodes) if size is None else size]), texts


SHAPES = {
    "two by two": ((2,), None),
    "a chain with siblings": ((2, 0), None),
    "a chain": ((1,), None),
    "three where there are": ((3, 1), None),
    "the first three nodes": ((2,), 3),
    "nothing proposed": ((2,), 0),
}


def law_of(target: SmallLaw, drawn: DraftTree, texts: list[Context], rules=tree_rules) -> torch.Tensor:
    """float64 `[V ** 3]`: a round by the engine's functions, then plain draws where it fell short."""
    probs = torch.stack([target.along(text, len(text) + 1)[-1] for text in texts])[None]
    accept = rules.accept_probabilities(probs, drawn)
    sequences = list(itertools.product(range(target.size), repeat=DEPTH + 1))
    law = torch.zeros(len(sequences), dtype=torch.float64)
    for decisions in itertools.product((False, True), repeat=drawn.ids.shape[1]):
        yes = torch.tensor([decisions])
        weight = torch.where(yes, accept, 1 - accept).prod()
        if weight == 0:
            continue
        last = tree_rules.walk(yes, drawn)[:, -1]
        following = rules.next_token_probs(probs, drawn, last)[0]
        text = texts[int(last)]
        for cell, sequence in enumerate(sequences):
            if sequence[: len(text)] == text:
                rest = float(target.chance(sequence, len(text) + 1))
                law[cell] += weight * following[sequence[len(text)]] * rest
    return law


def target_law(target: SmallLaw) -> torch.Tensor:
    sequences = itertools.product(range(target.size), repeat=DEPTH + 1)
    return torch.tensor([float(target.chance(sequence)) for sequence in sequences], dtype=torch.float64)


@pytest.mark.parametrize("support", [None, (0, 1)], ids=["full support", "reduced support"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_joint_law_is_the_targets(shape: str, size: int, support: tuple[int, ...] | None) -> None:
    target = SmallLaw(6, size, DEPTH, support)
    drawn, texts = grown(SmallLaw(56, size, DEPTH), *SHAPES[shape])
    assert torch.allclose(law_of(target, drawn, texts), target_law(target), atol=1e-12, rtol=0)


def test_an_id_twice_among_siblings_is_tried_once() -> None:
    target = SmallLaw(6, 3, DEPTH)
    drawn = tree([(0, 1), (0, 1), (0, 2), (1, 0), (2, 0)])
    texts = [(), (1,), (1,), (2,), (1, 0), (1, 0)]
    assert torch.allclose(law_of(target, drawn, texts), target_law(target), atol=1e-12, rtol=0)


class OneHotTwin:
    """The rule among siblings in fractions, as it is written down: accept x with the residual's probability,
    else zero it and renormalise.
    """

    def trial(self, residual: list[Fraction], draft: list[Fraction], token: int):
        """The chance of a yes, and after a no the residual and the draft."""
        left = [p if v != token else Fraction(0) for v, p in enumerate(residual)]
        mass = sum(left)
        return residual[token], [p / mass for p in left] if mass else left, draft


class RatioTwin:
    """The rule for children drawn without replacement: accept with min(1, residual / draft), else the
    residual's excess over the draft, and the draft without the token (Chen et al. 2024, arXiv 2402.12374).
    """

    def trial(self, residual: list[Fraction], draft: list[Fraction], token: int):
        accept = min(Fraction(1), residual[token] / draft[token])
        excess = [max(p - q, Fraction(0)) for p, q in zip(residual, draft, strict=True)]
        mass, left = sum(excess), [q if v != token else Fraction(0) for v, q in enumerate(draft)]
        rest = [p / mass for p in excess] if mass else residual
        return accept, rest, [q / sum(left) for q in left] if sum(left) else left


def exact_law(twin, target: SmallLaw, draft: SmallLaw, children) -> dict[Context, Fraction]:
    """The law of DEPTH + 1 tokens; `children(context)` gives the siblings after it with their chance."""
    law = dict.fromkeys(itertools.product(range(target.size), repeat=DEPTH + 1), Fraction(0))

    def go_on(context: Context, chance: Fraction) -> None:
        for siblings, drawn in children(context) if len(context) < DEPTH else [((), Fraction(1))]:
            residual, left, reach = target.table[context], draft.table[context], chance * drawn
            for token in siblings:
                accept, rest, left = twin.trial(residual, left, token)
                if accept and reach:
                    go_on((*context, token), reach * accept)
                reach, residual = reach * (1 - accept), rest
            for sequence in law:
                if reach and sequence[: len(context)] == context:
                    plain = target.chance(sequence, len(context) + 1)
                    law[sequence] += reach * residual[sequence[len(context)]] * plain

    go_on((), Fraction(1))
    return law


def by_rank(draft: SmallLaw, width: int):
    return lambda context: [(tuple(ranked(draft, context)[:width]), Fraction(1))]


def by_draws(draft: SmallLaw, width: int):
    """Every list of `width` children drawn without replacement, with its chance."""

    def children(context: Context):
        for siblings in itertools.permutations(range(draft.size), width):
            chance, left = Fraction(1), Fraction(1)
            for token in siblings:
                chance *= draft.table[context][token] / left
                left -= draft.table[context][token]
            yield siblings, chance

    return children


def distance(law: dict[Context, Fraction], target: SmallLaw) -> Fraction:
    return max(abs(chance - target.chance(sequence)) for sequence, chance in law.items())


@pytest.mark.parametrize("size", SIZES)
def test_the_twin_in_fractions_is_exact_and_agrees(size: int) -> None:
    target, draft = SmallLaw(6, size, DEPTH), SmallLaw(56, size, DEPTH)
    law = exact_law(OneHotTwin(), target, draft, by_rank(draft, 2))
    assert distance(law, target) == 0
    drawn, texts = grown(draft, (2,))
    probs = torch.stack([target.along(text, len(text) + 1)[-1] for text in texts])[None]
    accept = tree_rules.accept_probabilities(probs, drawn)[0]
    for parent, context in enumerate(texts[:3]):
        residual, left = target.table[context], draft.table[context]
        for node in (drawn.parents[0] == parent).nonzero()[:, 0].tolist():
            chance, residual, left = OneHotTwin().trial(residual, left, int(drawn.ids[0, node]))
            assert float(accept[node]) == pytest.approx(float(chance), abs=1e-12)
        if sum(residual):
            following = tree_rules.next_token_probs(probs, drawn, torch.tensor([parent]))[0].tolist()
            assert following == pytest.approx([float(p) for p in residual], abs=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_the_ratio_rule_is_right_for_drawn_children_and_wrong_for_those_chosen_by_rank(seed: int) -> None:
    target, draft = SmallLaw(seed, 3, DEPTH), SmallLaw(seed + 50, 3, DEPTH)
    assert distance(exact_law(RatioTwin(), target, draft, by_draws(draft, 2)), target) == 0
    assert distance(exact_law(RatioTwin(), target, draft, by_rank(draft, 2)), target) > Fraction(1, 100)
    assert distance(exact_law(OneHotTwin(), target, draft, by_rank(draft, 2)), target) == 0


class NotRenormalised:
    accept_probabilities = staticmethod(tree_rules.node_chances)
    next_token_probs = staticmethod(tree_rules.next_token_probs)


class NothingTakenOut:
    accept_probabilities = staticmethod(tree_rules.accept_probabilities)

    @staticmethod
    def next_token_probs(target_probs, drawn, last):
        return target_probs[torch.arange(len(last)), last]


class OffByOneColumn:
    next_token_probs = staticmethod(tree_rules.next_token_probs)

    @staticmethod
    def accept_probabilities(target_probs, drawn):
        return tree_rules.accept_probabilities(target_probs.roll(-1, 1), drawn)


WRONG = (NotRenormalised, NothingTakenOut, OffByOneColumn)


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_rule_changes_the_law(wrong) -> None:
    target = SmallLaw(6, 3, DEPTH)
    drawn, texts = grown(SmallLaw(56, 3, DEPTH), (2,))
    assert (law_of(target, drawn, texts, wrong) - target_law(target)).abs().max() > 1e-3


def test_the_expected_count_is_the_mean_count() -> None:
    target = SmallLaw(6, 3, DEPTH)
    for widths, size in SHAPES.values():
        drawn, texts = grown(SmallLaw(56, 3, DEPTH), widths, size)
        probs = torch.stack([target.along(text, len(text) + 1)[-1] for text in texts])[None]
        accept, mean = tree_rules.accept_probabilities(probs, drawn), 0.0
        for decisions in itertools.product((False, True), repeat=drawn.ids.shape[1]):
            yes = torch.tensor([decisions])
            accepted = drawn.depth_of(tree_rules.walk(yes, drawn))
            mean += float(torch.where(yes, accept, 1 - accept).prod() * accepted)
        assert float(tree_rules.expected_accepted(probs, drawn)) == pytest.approx(mean, abs=1e-12)


def test_a_walk_takes_the_first_yes_and_shorter_rows_wait() -> None:
    drawn = tree([(0, 1), (0, 2), (1, 3), (2, 4), (2, 5)], [(0, 1), (0, 2), (1, 3), (2, 4), (2, 5)])
    decisions = torch.tensor([[False, True, True, True, True], [True, True, False, True, True]])
    assert tree_rules.walk(decisions, drawn).tolist() == [[0, 2, 4], [0, 1, 1]]


def with_trees(engine) -> None:
    engine.drafter = make_tree_drafter(
        DraftModel(DRAFT), engine.runner, engine.options, prices(0.03, 6), stop_below=0.1
    )


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "settings",
    [
        {"answer": 24},
        pytest.param({"answer": 180}, marks=SLOW),
        pytest.param({"rule": "shared_noise"}, marks=SLOW),
        pytest.param({"options": SamplingOptions(1.3, top_k=5)}, marks=SLOW),
    ],
    ids=str,
)
def test_answers_follow_the_targets_law(settings: dict) -> None:
    assert law_p_value(change=with_trees, **settings) > 1e-4


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        pytest.param("accept_probabilities", NotRenormalised, marks=SLOW),
        ("next_token_probs", NothingTakenOut),
    ],
)
def test_a_wrong_rule_in_the_engine_is_caught(name: str, wrong, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_rules, name, getattr(wrong, name))
    assert law_p_value(change=with_trees, answer=24) < 1e-6


@pytest.mark.parametrize("options", [SAMPLED, SamplingOptions(1.0, repetition_penalty=1.3)], ids=str)
def test_with_shared_noise_trees_give_plain_samplings_very_tokens(options: SamplingOptions) -> None:
    target, wanted = llama(0), requests(8, 40)
    plain = decoder(target, options=options, rule="shared_noise").generate(wanted)
    engine = tree_decoder(target, relative(target), options=options, rule="shared_noise")
    assert tokens(engine.generate(wanted)) == tokens(plain)
    account = engine.account
    assert account.siblings > 0 and account.accepted > 20
    assert account.expected["shared_noise"] == pytest.approx(account.accepted, rel=0.25)
