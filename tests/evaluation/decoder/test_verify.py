"""Losslessness by exact enumeration of the very functions that the engine calls, in float64 and beside a twin
in fractions, and by their joint law over many rounds; each with controls that fail.
"""

import itertools
from fractions import Fraction

import pytest
import torch
from scipy.stats import chi2

from evaluation.decoder.noise import invert, race
from evaluation.decoder.verify import (
    BLOCK,
    MATCH,
    ONE_HOT,
    TOKEN,
    BlockRule,
    TokenRule,
    shared_noise_accept_probabilities,
)
from tests.evaluation.decoder.small_laws import FractionRule, SmallLaw, drafts, fraction_law

RULES = {"token": TOKEN, "block": BLOCK, "one_hot": ONE_HOT}
SIZES = [(v, k) for v in (2, 3) for k in (1, 2, 3)]


def pair(case: str, size: int, count: int) -> tuple[SmallLaw, SmallLaw]:
    last = size - 1
    supports = {
        "independent": (None, None),
        "equal": (None, None),
        "disjoint supports": ((0,), tuple(range(1, size))),
        "reduced draft vocabulary": (None, (0, last)[: size - 1]),
        "reduced target support": ((0, last)[: size - 1], None),
        "draft of a single token": (None, (last,)),
    }
    wanted, offered = supports[case]
    seed = 6 if case == "equal" else 56
    return SmallLaw(6, size, count, wanted), SmallLaw(seed, size, count, offered)


CASES = (
    "independent", "equal", "disjoint supports", "reduced draft vocabulary", "reduced target support",
    "draft of a single token",
)  # fmt: skip
PROPOSED = {
    "all": len,
    # A drafter that stops early: how far it goes depends on what it has proposed, not on what comes next.
    "up to the first 0": lambda drafted: next((i + 1 for i, t in enumerate(drafted) if t == 0), len(drafted)),
}


def states(target: SmallLaw, draft: SmallLaw, one_hot: bool, proposed):
    """Every draft as one batch: chances, target_probs, draft_probs, drafted, proposed."""
    found = [(draft.argmax_draft(), Fraction(1))] if one_hot else list(drafts(draft))
    chances = torch.tensor([float(chance) for _, chance in found], dtype=torch.float64)
    target_probs = torch.stack([target.along(drafted, target.count + 1) for drafted, _ in found])
    draft_probs = torch.stack([draft.along(drafted, target.count) for drafted, _ in found])
    ids = torch.tensor([drafted for drafted, _ in found])
    counts = torch.tensor([proposed(drafted) for drafted, _ in found])
    return chances, target_probs, draft_probs, ids, counts


def joint_law(rule, target: SmallLaw, draft: SmallLaw, proposed=len) -> torch.Tensor:
    """float64 `[V ** (K + 1)]`: a round by the engine's functions, then plain draws where it fell short."""
    chances, *probs, ids, counts = states(target, draft, rule is ONE_HOT, proposed)
    accept = rule.accept_probabilities(*probs, ids, counts)
    sequences = list(itertools.product(range(target.size), repeat=target.count + 1))
    law = torch.zeros(len(sequences), dtype=torch.float64)
    for decisions in itertools.product((False, True), repeat=target.count):
        yes = torch.tensor(decisions).expand(len(ids), -1)
        weight = chances * torch.where(yes, accept, 1 - accept).prod(dim=1)
        accepted = rule.count_accepted(yes)
        following = rule.next_token_probs(*probs, ids, accepted, counts)
        for row, count in enumerate(accepted.tolist()):
            for cell, tokens in enumerate(sequences):
                if weight[row] > 0 and list(tokens[:count]) == ids[row, :count].tolist():
                    rest = float(target.chance(tokens, count + 1))
                    law[cell] += weight[row] * following[row, tokens[count]] * rest
    return law


def target_law(target: SmallLaw) -> torch.Tensor:
    sequences = itertools.product(range(target.size), repeat=target.count + 1)
    return torch.tensor([float(target.chance(tokens)) for tokens in sequences], dtype=torch.float64)


@pytest.mark.parametrize(("size", "count"), SIZES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", RULES)
def test_the_joint_law_is_the_targets(name: str, case: str, size: int, count: int) -> None:
    target, draft = pair(case, size, count)
    for proposed in PROPOSED.values():
        law = joint_law(RULES[name], target, draft, proposed)
        assert torch.allclose(law, target_law(target), atol=1e-12, rtol=0)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", RULES)
def test_the_twin_in_fractions_is_exact_and_agrees(name: str, case: str) -> None:
    target, draft = pair(case, 3, 2)
    twin, rule = FractionRule(name, target, draft), RULES[name]
    for proposed in PROPOSED.values():
        law = fraction_law(twin, proposed)
        assert law == {tokens: target.chance(tokens) for tokens in law}
        _, *probs, ids, counts = states(target, draft, name == "one_hot", proposed)
        accept = rule.accept_probabilities(*probs, ids, counts)
        for row, drafted in enumerate(map(tuple, ids.tolist())):
            wanted = [float(chance) for chance in twin.accept(drafted, int(counts[row]))]
            assert accept[row].tolist() == pytest.approx(wanted, abs=1e-12)
            for accepted in range(int(counts[row]) + 1):
                following = rule.next_token_probs(*probs, ids, torch.full_like(counts, accepted), counts)
                wanted = [float(p) for p in twin.following(drafted, accepted, int(counts[row]))]
                assert following[row].tolist() == pytest.approx(wanted, abs=1e-12)


class NoResidual(TokenRule):
    def next_token_probs(self, target_probs, draft_probs, drafted, accepted, proposed):
        return target_probs[torch.arange(len(accepted)), accepted]


class BonusFromTheDraft(TokenRule):
    def next_token_probs(self, target_probs, draft_probs, drafted, accepted, proposed):
        right = super().next_token_probs(target_probs, draft_probs, drafted, accepted, proposed)
        return torch.where((accepted == proposed)[:, None], draft_probs[:, -1], right)


class OffByOneColumn(TokenRule):
    def accept_probabilities(self, target_probs, draft_probs, drafted, proposed):
        return super().accept_probabilities(target_probs.roll(-1, 1), draft_probs, drafted, proposed)


class OffByOneRow(TokenRule):
    def accept_probabilities(self, target_probs, draft_probs, drafted, proposed):
        return super().accept_probabilities(target_probs.roll(1, 0), draft_probs, drafted, proposed)


class AcceptWhereLikelier(TokenRule):
    def accept_probabilities(self, *states):
        return super().accept_probabilities(*states).floor()


class EarlyBreak(BlockRule):
    count_accepted = TokenRule.count_accepted


class TokenResidual(BlockRule):
    next_token_probs = TokenRule.next_token_probs


WRONG = (
    NoResidual, BonusFromTheDraft, OffByOneColumn, OffByOneRow, AcceptWhereLikelier, EarlyBreak,
    TokenResidual,
)  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_rule_changes_the_law(wrong) -> None:
    target, draft = pair("independent", 3, 3)
    assert (joint_law(wrong(), target, draft) - target_law(target)).abs().max() > 1e-3


def expected_by_counting(rule, states) -> torch.Tensor:
    """Mean accepted drafts `[B]` by enumeration of the decisions."""
    accept = rule.accept_probabilities(*states)
    total = torch.zeros(len(accept), dtype=torch.float64)
    for decisions in itertools.product((False, True), repeat=accept.shape[1]):
        yes = torch.tensor(decisions).expand(len(accept), -1)
        total += torch.where(yes, accept, 1 - accept).prod(dim=1) * rule.count_accepted(yes)
    return total


@pytest.mark.parametrize("name", RULES)
def test_the_expected_count_is_the_mean_count(name: str) -> None:
    target, draft = pair("independent", 3, 3)
    for proposed in PROPOSED.values():
        _, *rest = states(target, draft, name == "one_hot", proposed)
        expected = RULES[name].expected_accepted(RULES[name].accept_probabilities(*rest))
        assert torch.allclose(expected, expected_by_counting(RULES[name], rest), atol=1e-12)


def test_block_verification_accepts_more_and_as_much_as_the_paper_says() -> None:
    """The toy of Sun et al. 2024: draft (2/3, 1/3), target (1/3, 2/3), two tokens: 10/9 and 11/9."""
    target, draft = SmallLaw(0, 2, 2), SmallLaw(0, 2, 2)
    for context in target.table:
        target.table[context] = [Fraction(1, 3), Fraction(2, 3)]
        draft.table[context] = [Fraction(2, 3), Fraction(1, 3)]
    chances, *rest = states(target, draft, False, len)
    for rule, wanted in ((TOKEN, 10 / 9), (BLOCK, 11 / 9)):
        expected = rule.expected_accepted(rule.accept_probabilities(*rest))
        assert float(chances @ expected) == pytest.approx(wanted, abs=1e-12)
    for seed in range(5):
        target, draft = SmallLaw(seed, 3, 3), SmallLaw(seed + 50, 3, 3)
        chances, *rest = states(target, draft, False, len)
        token, block = (rule.expected_accepted(rule.accept_probabilities(*rest)) for rule in (TOKEN, BLOCK))
        assert float(chances @ block) > float(chances @ token)


def test_token_acceptance_is_one_minus_the_total_variation_distance() -> None:
    target, draft = pair("independent", 3, 1)
    chances, *rest = states(target, draft, False, len)
    distance = 0.5 * (rest[0][0, 0] - rest[1][0, 0]).abs().sum()
    assert torch.allclose(chances @ TOKEN.accept_probabilities(*rest)[:, 0], 1 - distance, atol=1e-12)


@pytest.mark.parametrize("rule", [TOKEN, BLOCK])
def test_an_empty_residual_falls_back_to_the_target(rule) -> None:
    probs = pair("equal", 3, 1)[0].along((0,), 2)[None]
    following = rule.next_token_probs(
        probs, probs[:, :1], torch.tensor([[0]]), torch.tensor([0]), torch.tensor([1])
    )
    assert torch.equal(following, probs[:, 0])


@pytest.mark.parametrize("rule", [TOKEN, BLOCK])
def test_a_draft_that_is_not_a_number_is_rejected_and_the_target_stands_in(rule) -> None:
    target, draft = pair("independent", 3, 2)
    _, target_probs, draft_probs, ids, counts = states(target, draft, False, len)
    draft_probs[:, 0] = torch.nan
    accept = rule.accept_probabilities(target_probs, draft_probs, ids, torch.ones_like(counts))
    assert torch.equal(accept, torch.zeros_like(accept))
    none = torch.zeros_like(counts)
    following = rule.next_token_probs(target_probs, draft_probs, ids, none, torch.ones_like(counts))
    assert torch.equal(following, target_probs[:, 0])


@pytest.mark.parametrize("rule", [TOKEN, BLOCK])
def test_columns_that_are_not_proposed_decide_nothing(rule) -> None:
    target, draft = pair("independent", 3, 3)
    _, target_probs, draft_probs, ids, _ = states(target, draft, False, len)
    for count in (0, 1, 2):
        counts = torch.full((len(ids),), count)
        right = rule.accept_probabilities(target_probs, draft_probs, ids, counts)
        other_probs, other_ids = draft_probs.clone(), ids.clone()
        other_probs[:, count:], other_ids[:, count:] = torch.nan, 0
        assert torch.equal(rule.accept_probabilities(target_probs, other_probs, other_ids, counts), right)
        following = rule.next_token_probs(target_probs, other_probs, other_ids, counts, counts)
        assert torch.equal(following, target_probs[:, count])


def test_counting_stops_at_the_first_no_but_in_a_block() -> None:
    decisions = torch.tensor([[False, True, True], [True, False, True], [True, True, False]])
    assert TOKEN.count_accepted(decisions).tolist() == [0, 1, 2]
    assert BLOCK.count_accepted(decisions).tolist() == [3, 3, 2]


def test_matching_keeps_the_prefix_that_the_target_has_chosen() -> None:
    target_ids = torch.tensor([[4, 5, 6, 7]] * 4)
    drafted = torch.tensor([[4, 5, 9], [4, 5, 6], [9, 5, 6], [4, 5, 6]])
    accept = MATCH.accept_probabilities(target_ids, drafted, torch.tensor([3, 3, 3, 1]))
    accepted = MATCH.count_accepted(accept > 0)
    assert accepted.tolist() == [2, 3, 0, 1]
    assert MATCH.next_token(target_ids, accepted).tolist() == [6, 7, 4, 5]
    assert MATCH.expected_accepted(accept).tolist() == [2, 3, 0, 1]


def agreement(target: torch.Tensor, draft: torch.Tensor) -> float:
    """Chance that target and draft choose the same id, by the closed form, for probs `[V]`."""
    size = len(target)
    chances = shared_noise_accept_probabilities(
        target.expand(size, 2, size), draft.expand(size, 1, size), torch.arange(size)[:, None],
        torch.ones(size, dtype=torch.int64),
    )  # fmt: skip
    return float(draft @ chances[:, 0])


def test_shared_noise_agrees_as_often_as_its_closed_form_says() -> None:
    target = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    draft = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
    two = torch.tensor([[0.7, 0.3], [0.4, 0.6]], dtype=torch.float64)
    assert agreement(*two) == pytest.approx(0.7, abs=1e-12)  # two ids: 1 - TVD, as one number decides
    assert agreement(target, draft) == pytest.approx(0.873, abs=5e-4)
    numbers = torch.rand(200_000, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    chosen, drafted = race(target, numbers), race(draft, numbers)
    spread = (0.873 * 0.127 / 200_000) ** 0.5
    assert float((chosen == drafted).double().mean()) == pytest.approx(
        agreement(target, draft), abs=4 * spread
    )
    for seed in range(5):
        a, b = torch.rand(2, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        a, b = a / a.sum(), b / b.sum()
        distance = float((a - b).abs().sum() / 2)
        assert (1 - distance) / (1 + distance) - 1e-12 <= agreement(a, b) <= 1 - distance + 1e-12


ROUNDS, VOCAB, COUNT = 200_000, 8, 2


def table(seed: int, spread: float) -> list[torch.Tensor]:
    """Probabilities `[8 ** n, 8]` after contexts of n = 0, 1, 2 tokens, float32."""
    generator = torch.Generator().manual_seed(seed)
    logits = [torch.randn(VOCAB**n, VOCAB, generator=generator) * spread for n in range(COUNT + 1)]
    return [row.softmax(dim=1) for row in logits]


TARGET, DRAFT = table(1, 1.0), table(2, 1.0)
HOTTER = [(row.log() / 2).softmax(dim=1) for row in DRAFT]
NUCLEUS = [row * (row > row.median(dim=1, keepdim=True).values) for row in DRAFT]
NUCLEUS = [row / row.sum(dim=1, keepdim=True) for row in NUCLEUS]


def rounds_p_value(rule, drawn_from=DRAFT, told=DRAFT) -> float:
    """p-value of the joint counts of three tokens over 200,000 rounds of the vectorised rule."""
    generator = torch.Generator().manual_seed(5)

    def number(*shape: int) -> torch.Tensor:
        return torch.rand(ROUNDS, *shape, generator=generator, dtype=torch.float64)

    context = torch.zeros(ROUNDS, dtype=torch.int64)
    ids, draft_probs, target_probs = [], [], []
    for step in range(COUNT):
        ids.append(
            drawn_from[step][context].argmax(dim=1)
            if rule is ONE_HOT
            else invert(drawn_from[step][context], number())
        )
        draft_probs.append(told[step][context])
        target_probs.append(TARGET[step][context])
        context = context * VOCAB + ids[-1]
    target_probs.append(TARGET[COUNT][context])
    drafted, counts = torch.stack(ids, dim=1), torch.full((ROUNDS,), COUNT)
    probs = torch.stack(target_probs, dim=1), torch.stack(draft_probs, dim=1)
    decisions = number(COUNT) < rule.accept_probabilities(*probs, drafted, counts)
    accepted = rule.count_accepted(decisions)
    following = invert(rule.next_token_probs(*probs, drafted, accepted, counts), number())
    cell = torch.zeros(ROUNDS, dtype=torch.int64)
    for step in range(COUNT + 1):
        plain = invert(TARGET[step][cell], number())
        token = torch.where(accepted == step, following, plain)
        if step < COUNT:
            token = torch.where(accepted > step, drafted[:, step], token)
        cell = cell * VOCAB + token
    law = TARGET[0].double().flatten()
    for step in range(1, COUNT + 1):
        law = (law[:, None] * TARGET[step].double()).flatten()
    return p_value(torch.bincount(cell, minlength=len(law)), law * ROUNDS)


def p_value(observed: torch.Tensor, expected: torch.Tensor) -> float:
    """Pearson's chi-square; cells that expect fewer than 5 are one."""
    common = expected >= 5
    observed = torch.cat((observed[common], observed[~common].sum()[None])).double()
    expected = torch.cat((expected[common], expected[~common].sum()[None])).double()
    statistic = ((observed - expected) ** 2 / expected.clamp(min=1e-9)).sum()
    return float(chi2.sf(float(statistic), len(expected) - 1))


@pytest.mark.parametrize("name", RULES)
def test_many_rounds_follow_the_targets_law(name: str) -> None:
    assert rounds_p_value(RULES[name]) > 1e-4


@pytest.mark.parametrize("wrong", WRONG)
def test_many_rounds_of_a_wrong_rule_do_not(wrong) -> None:
    assert rounds_p_value(wrong()) < 1e-6


@pytest.mark.parametrize("told", [HOTTER, DRAFT], ids=["wrong temperature", "before top-p"])
@pytest.mark.parametrize("rule", [TOKEN, BLOCK])
def test_many_rounds_told_another_draft_distribution_do_not(rule, told) -> None:
    drawn_from = DRAFT if told is HOTTER else NUCLEUS
    assert rounds_p_value(rule, drawn_from, told) < 1e-6
    assert rounds_p_value(rule, drawn_from, drawn_from) > 1e-4
