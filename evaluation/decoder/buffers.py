"""What a round reads and writes, in buffers that keep their places: a captured round knows addresses alone.

Shapes: B rows, K drafted tokens, S positions, V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from evaluation.decoder.drafters import DraftState
from evaluation.decoder.noise import Draws, signed
from evaluation.decoder.penalties import Prefix
from evaluation.decoder.rows import Request, Row
from evaluation.decoder.runner import Runner


@dataclass
class Buffers:
    """The rows' state on the device. A row whose `position` has reached its `end` is frozen: rounds change
    nothing of it. So is a slot without a row.
    """

    tokens: torch.Tensor
    """int64 `[B, S + 1]`: prompt and answer; the last token of row b stands at `position[b]`, what follows is
    stale.
    """
    position: torch.Tensor
    """int64 `[B]`: of the last emitted token, which no model has seen yet."""
    end: torch.Tensor
    """int64 `[B]`: where the last token of the longest answer would stand."""
    prompt_length: torch.Tensor
    """int64 `[B]`."""
    seeds: torch.Tensor
    """int64 `[B]`."""
    features: torch.Tensor
    """`[B, H]`: the target's last hidden state before `position`."""

    @classmethod
    def of(cls, runner: Runner) -> Buffers:
        """For as many rows as the target's runner has."""
        rows, device = runner.cache.num_rows, runner.device

        def numbers(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, dtype=torch.int64, device=device)

        return cls(
            tokens=numbers(rows, runner.length + 1),
            position=numbers(rows),
            end=numbers(rows),
            prompt_length=numbers(rows),
            seeds=numbers(rows),
            features=torch.zeros(rows, runner.hidden_size, dtype=runner.dtype, device=device),
        )

    def start(self, slot: int, request: Request, prompt: torch.Tensor) -> None:
        """A row begins: the answer to `request`, whose prompt is int64 `[n]`."""
        self.tokens[slot, : len(prompt)] = prompt
        self.prompt_length[slot] = len(prompt)
        self.position[slot] = len(prompt) - 1
        self.end[slot] = len(prompt) + request.max_new_tokens - 1
        self.seeds[slot] = signed(request.seed)

    def move(self, source: int, destination: int) -> None:
        for each in fields(self):
            state = getattr(self, each.name)
            state[destination] = state[source]

    def freeze(self, slot: int) -> None:
        self.end[slot] = 0

    def left(self, active: slice) -> torch.Tensor:
        """Tokens that rows may still emit, int64 `[B]`."""
        return (self.end[active] - self.position[active]).clamp(min=0)

    def state(self, active: slice, draws: Draws, prefix: Prefix | None, window: int) -> DraftState:
        """What a drafter may look at of the rows."""
        return DraftState(
            self.tokens[active],
            self.position[active],
            self.features[active],
            draws,
            prefix,
            window,
            (self.left(active) - 1).clamp(min=0),
        )

    def prefix(self, active: slice, vocab_size: int) -> Prefix:
        return Prefix.of(self.tokens[active], self.prompt_length[active], self.position[active], vocab_size)

    def advance(
        self,
        active: slice,
        ids: torch.Tensor,
        token: torch.Tensor,
        accepted: torch.Tensor,
        hidden: torch.Tensor,
    ) -> None:
        """Rows go on by `accepted [B]` of their drafts `ids [B, K]` and one `token [B]` more; `hidden [B,
        K + 1, H]` are the states that these come from.

        All drafts go behind the last token, and the next token over the first that did not stand: what is
        behind it is stale.
        """
        tokens, position, last = self.tokens[active], self.position[active], self.tokens.shape[1] - 1
        ahead = torch.arange(1, ids.shape[1] + 1, device=ids.device)
        left = self.left(active)
        tokens.scatter_(1, (position[:, None] + ahead).clamp(max=last), ids)
        position += (accepted + 1).minimum(left)
        tokens.scatter_(1, position[:, None], token.clamp(min=0)[:, None])
        self.features[active] = hidden[torch.arange(len(token), device=token.device), accepted]


@dataclass
class Played:
    """What a round came to, on the device."""

    numbers: torch.Tensor
    """int64 `[B, K + 4]`: drafts, the next token, accepted, proposed, siblings."""
    expected: torch.Tensor
    """float64 `[R, B]`: accepted drafts on average, by rule."""
    rules: tuple[str, ...]
    """Their names, R of them."""
    steps: int
    """Draft steps that it took."""
    siblings: int
    """Columns beside them."""
    states: tuple[torch.Tensor, ...]
    """Where they are kept: hidden states `[B, K + 1, H]` and summaries of the logits `[B, K + 1, 2]`."""


class Readback:
    """A round's results on their way to the host: `numbers` and `expected` wait for them, nothing else does.

    Copied at once, for the next replay overwrites them.
    """

    def __init__(self, played: Played, rows: Sequence[Row], most: int) -> None:
        """`rows` took part, and got at most `most` tokens each."""
        self.rows, self.most = list(rows), most
        self.rules, self.steps, self.siblings = played.rules, played.steps, played.siblings
        self.states = tuple(state.clone() for state in played.states)
        self._numbers, self._expected = _copy(played.numbers), _copy(played.expected)
        self.arrived: torch.cuda.Event | None = None
        if played.numbers.is_cuda:
            self.arrived = torch.cuda.Event()
            self.arrived.record()

    def wait(self) -> None:
        if self.arrived is not None:
            self.arrived.synchronize()

    def numbers(self) -> list[list[int]]:
        self.wait()
        return self._numbers.tolist()

    def expected(self) -> dict[str, list[float]]:
        """By rule, a number per row."""
        self.wait()
        return dict(zip(self.rules, self._expected.tolist(), strict=True))


def _copy(source: torch.Tensor) -> torch.Tensor:
    """On the host, where it has arrived when the stream has got there."""
    copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
    return copy.copy_(source, non_blocking=True)
