"""Numbers that depend on a row's seed and position alone, and the draws made of them."""

import pytest
import torch
from scipy.stats import chisquare, kstest

from evaluation.decoder.noise import ACCEPT, DRAFT, NEXT, Draws, invert, race, signed, uniforms


def numbers(stream: int = NEXT, count: int = 50) -> torch.Tensor:
    seeds = torch.arange(20).repeat_interleave(20)
    positions = torch.arange(20).repeat(20)
    return uniforms(seeds, positions, stream, count)


def test_numbers_are_uniform_and_differ_by_seed_position_stream_and_index() -> None:
    drawn = torch.cat([numbers(stream) for stream in (DRAFT, ACCEPT, NEXT)])
    assert drawn.min() > 0 and drawn.max() < 1
    assert len(drawn.unique()) == drawn.numel()
    assert kstest(drawn.flatten().numpy(), "uniform").pvalue > 1e-4


def test_neighbouring_numbers_are_independent() -> None:
    """By seed, position, index and stream: two neighbours fill the unit square evenly."""
    one, other = numbers(DRAFT).reshape(20, 20, 50), numbers(ACCEPT).reshape(20, 20, 50)
    pairs = {
        "seed": (one[:-1], one[1:]),
        "position": (one[:, :-1], one[:, 1:]),
        "index": (one[..., :-1], one[..., 1:]),
        "stream": (one, other),
    }
    for name, (first, second) in pairs.items():
        cells = (first * 10).long() * 10 + (second * 10).long()
        assert chisquare(torch.bincount(cells.flatten(), minlength=100)).pvalue > 1e-4, name


def test_a_rows_numbers_do_not_depend_on_its_batch_or_on_how_many_are_asked_for() -> None:
    seeds, positions = torch.tensor([5, 6, 7]), torch.tensor([9, 3, 11])
    crowd = uniforms(seeds, positions, ACCEPT, 6)
    alone = uniforms(seeds[2:], positions[2:], ACCEPT, 2)
    assert torch.equal(crowd[2, :2], alone[0])


@pytest.mark.parametrize("seed", [0, 2**63 - 1, 2**63, 2**64 - 1, -1, 10**30])
def test_any_seed_fits(seed: int) -> None:
    assert uniforms(torch.tensor([signed(seed)]), torch.tensor([0]), NEXT, 1).shape == (1, 1)


def test_inversion_never_gives_a_token_of_no_mass() -> None:
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]])
    for uniform, token in ((0.0, 1), (0.2499, 1), (0.2501, 3), (1 - 1e-16, 3)):
        assert invert(probs, torch.tensor([uniform], dtype=torch.float64)).tolist() == [token]


def test_both_ways_to_draw_follow_the_distribution() -> None:
    probs = torch.tensor([0.1, 0.0, 0.6, 0.3])
    drawn = numbers(count=200).flatten()
    for tokens in (invert(probs.expand(len(drawn), -1), drawn), race(probs, drawn.reshape(-1, 4))):
        counts = torch.bincount(tokens, minlength=4)
        assert counts[1] == 0
        expected = probs[[0, 2, 3]].double() * len(tokens)
        assert chisquare(counts[[0, 2, 3]], expected / expected.sum() * len(tokens)).pvalue > 1e-4


def test_shared_draws_belong_to_positions_and_others_to_rounds() -> None:
    probs = torch.full((1, 64), 1 / 64)
    seeds = torch.tensor([3])

    def draws(position: int, shared: bool) -> Draws:
        return Draws(seeds, torch.tensor([position]), shared)

    # The token at place 12: drafted second after 10, first after 11, and chosen by the target itself.
    assert draws(10, True).draft(probs, 1) == draws(11, True).draft(probs, 0)
    ahead = torch.tensor([[1, 2, 3]])
    chosen = draws(10, True).race(probs[:, None].expand(1, 3, 64), ahead)
    assert chosen[0, 1] == draws(11, True).draft(probs, 0)
    assert draws(10, False).draft(probs, 1) != draws(11, False).draft(probs, 0)
