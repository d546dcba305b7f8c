"""Random numbers as a pure function of a row's seed and position.

No generator has a state: what a row draws depends on nothing but itself, not on its batch or on where it was
interrupted, and the numbers are made on the device that uses them. Numbers are hashes by the finaliser of
SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators").

Two ways to draw a token. *Inversion* takes one uniform number. The *race* takes an exponential number per id;
where target and draft run it with the same numbers they mostly choose the same token, and the target's choice
does not depend on the draft at all.

Shapes: B rows, K drafted tokens, T positions, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

DRAFT, ACCEPT, NEXT, RACE = range(4)  # streams, so that no two uses share a number


def signed(number: int) -> int:
    """A number's last 64 bits as torch's int64 holds them."""
    return (number + 2**63) % 2**64 - 2**63


GOLDEN, FIRST, SECOND = map(signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def shift_right(number: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift without the sign, which torch's shift of int64 would pull in."""
    return (number >> bits) & ((1 << (64 - bits)) - 1)


def mix(number: torch.Tensor) -> torch.Tensor:
    number = (number ^ shift_right(number, 30)) * FIRST
    number = (number ^ shift_right(number, 27)) * SECOND
    return number ^ shift_right(number, 31)


def uniforms(seed: torch.Tensor, position: torch.Tensor, stream: int, count: int) -> torch.Tensor:
    """Float64 `[..., count]` in (0, 1) for seeds and positions int64 `[...]`."""
    state = mix(seed + GOLDEN)
    state = mix(state + (position * 4 + stream + 1) * GOLDEN)
    index = torch.arange(1, count + 1, device=seed.device)
    hashed = mix(state[..., None] + index * GOLDEN)
    return (shift_right(hashed, 12).double() + 0.5) * 2.0**-52


def invert(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Tokens int64 `[...]` drawn from probs `[..., V]` with uniform numbers float64 `[...]` in [0, 1).

    The cumulative sum is taken in float64: in float32 its rounding over a large vocabulary would shift
    probabilities.
    """
    cumulative = probs.double().cumsum(dim=-1)
    threshold = uniform[..., None] * cumulative[..., -1:]
    # right=True skips tokens of zero probability, also where the threshold is exactly zero.
    return torch.searchsorted(cumulative, threshold, right=True)[..., 0].clamp(max=probs.shape[-1] - 1)


def race(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Tokens int64 `[...]` drawn from probs `[..., V]` with uniform numbers float64 `[..., V]` in (0, 1).

    The id whose exponential clock of rate probs(x) rings first: argmax probs(x) / -log(u_x), which is
    argmax log probs(x) + Gumbel noise.
    """
    return (probs / -uniform.log()).argmax(dim=-1)


@dataclass(frozen=True)
class Draws:
    """The draws of one round of B rows whose last tokens stand at `position`, int64 `[B]`.

    By inversion each round has numbers of its own: what a round has rejected tells nothing about the next.
    `shared` is the race, whose numbers belong to the position of the token that is drawn.
    """

    seeds: torch.Tensor
    position: torch.Tensor
    shared: bool

    def draft(self, probs: torch.Tensor, step: int) -> torch.Tensor:
        """Drafted token number `step`, int64 `[B]`, from probs `[B, V]`."""
        if self.shared:
            return self.race(probs[:, None], torch.full_like(self.position, step + 1)[:, None])[:, 0]
        return invert(probs, uniforms(self.seeds, self.position, DRAFT, step + 1)[:, step])

    def decide(self, accept: torch.Tensor) -> torch.Tensor:
        """bool `[B, K]` that are true with the probabilities `accept`, `[B, K]`."""
        return uniforms(self.seeds, self.position, ACCEPT, accept.shape[1]) < accept

    def next(self, probs: torch.Tensor) -> torch.Tensor:
        """The round's last token, int64 `[B]`, from probs `[B, V]`."""
        return invert(probs, uniforms(self.seeds, self.position, NEXT, 1)[:, 0])

    def race(self, probs: torch.Tensor, ahead: torch.Tensor) -> torch.Tensor:
        """Tokens int64 `[B, T]` from probs `[B, T, V]`, each `ahead` (int64 `[B, T]`) tokens behind the last
        one.
        """
        places = self.position[:, None] + ahead
        numbers = uniforms(self.seeds[:, None].expand_as(places), places, RACE, probs.shape[2])
        return race(probs, numbers)
