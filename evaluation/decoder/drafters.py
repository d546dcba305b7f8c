"""Drafters: who proposes the next K tokens. The protocol of all kinds, and the small model.

Shapes: B active rows, K drafted tokens, V target vocabulary, Vd rows of a reduced draft head, H target hidden
size.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from evaluation.decoder.noise import Draws
from evaluation.decoder.penalties import Adjustment, Prefix
from evaluation.decoder.runner import Branches, Runner
from evaluation.decoder.sampling import SamplingOptions, probabilities


@dataclass
class DraftModel:
    """A drafter's weights (a causal LM of its own, or heads on the target: `heads.HeadModel`), and the target
    ids that its head covers.
    """

    model: PreTrainedModel
    vocab: torch.Tensor | None = None
    """int64 `[Vd]`, ascending target ids: row j of the head is target id `vocab[j]`. None: the full
    vocabulary.
    """


@dataclass
class DraftState:
    """What a drafter may look at when a round begins."""

    tokens: torch.Tensor
    """int64 `[B, S]`: prompt and emitted tokens; the last of row b stands at `position[b]`, what follows is
    stale.
    """
    position: torch.Tensor
    """int64 `[B]`: position of the last emitted token, which no model has seen yet."""
    features: torch.Tensor
    """`[B, H]`: the target's last hidden state of the position before, which predicted the last emitted
    token.
    """
    draws: Draws
    """The round's random numbers."""
    prefix: Prefix | None
    """Token counts `[B, V]` of the text so far; None where no option asks for them."""
    window: int | None = None
    """Cache slots that hold all positions of the round, where the engine knows."""
    left: torch.Tensor | None = None
    """int64 `[B]`: how many tokens of a draft each row may use, where the engine knows."""


@dataclass
class Draft:
    """Proposed tokens."""

    ids: torch.Tensor
    """int64 `[B, K]`, of which row b proposes the first `proposed[b]`."""
    proposed: torch.Tensor
    """int64 `[B]`."""
    probs: torch.Tensor | None
    """`[B, K, V]`, exactly what each token was drawn from; None where tokens were chosen, not drawn
    (one-hot), and where there are none.
    """

    @property
    def steps(self) -> int:
        """Draft steps that it took."""
        return self.ids.shape[1]

    @property
    def lengths(self) -> torch.Tensor:
        """int64 `[B]`: tokens that each row might have accepted at most."""
        return self.proposed

    def limit(self, lengths: torch.Tensor) -> None:
        """Propose nothing further ahead than `lengths` (int64 `[B]`) tokens."""
        self.proposed = self.proposed.minimum(lengths)

    @classmethod
    def none(cls, position: torch.Tensor) -> Draft:
        """No proposals for rows at `position [B]`."""
        return cls(position.new_zeros(position.shape[0], 0), torch.zeros_like(position), None)


class Drafter(Protocol):
    """Proposes tokens for rows 0..B-1, which the engine keeps contiguous."""

    @property
    def capturable(self) -> bool:
        """Whether `draft` is a function of fixed shape over buffers, in which the host reads nothing."""

    @property
    def follows(self) -> bool:
        """Whether rows may propose fewer than they are asked for and all steps are taken nevertheless, so
        that the next rounds' counts should follow what was proposed.
        """

    def start(self, row: int) -> None:
        """Row `row` begins anew."""

    def move(self, source: int, destination: int) -> None:
        """Row `source` continues as row `destination`."""

    def prepare(self, state: DraftState, count: int) -> None:
        """Do what the host has to do before `draft` is asked the same."""

    def draft(self, state: DraftState, count: int) -> Draft:
        """Propose up to `count` tokens ahead for each row of `state`: a chain, or a `tree.DraftTree`. 0 says
        that this round drafts nothing.
        """


class ModelDrafter:
    """A small causal LM, or the target itself as the health check that accepts everything.

    It reads a row's text when it first drafts for it, and what it missed when drafting was paused. A row that
    reaches the end of the drafter's context gets no more drafts, and decoding goes on.
    """

    capturable = True

    def __init__(
        self,
        draft: DraftModel,
        target: Runner,
        options: SamplingOptions,
        *,
        argmax: bool = False,
        stop_below: float = 0.0,
        optimize: bool = True,
        int8: bool = False,
    ) -> None:
        """Rows and positions as the target's; `argmax` drafts greedily also where the target samples;
        `optimize` and `int8` as in `Runner`.

        A row's draft ends early where the drafter's own probability of all that it has proposed falls below
        `stop_below`: what is unlikely to be accepted costs draft steps and a wider verify forward. Whether to
        go on depends on proposed tokens only, never on the next one, so the output stays the target's.
        """
        rows, device = target.cache.num_rows, target.device
        self.context = min(context_of(target), context_of(draft.model))
        self.target = target
        self.runner = self.make_runner(draft.model, rows, optimize=optimize, int8=int8)
        self.vocab = None if draft.vocab is None else draft.vocab.to(device)
        self.target_vocab_size = target.vocab_size
        self.options = options
        self.adjust = Adjustment(options, target.vocab_size, device, self.vocab)
        self.argmax = argmax or options.greedy
        self.stop_below = stop_below
        self.watches = device.type == "cpu"  # whether any row goes on: on a GPU looking would stop the stream
        # Positions below `known[b]` have right cache entries, as far as the row has got.
        self.known = torch.zeros(rows, dtype=torch.int64, device=device)
        self.lagging = False

    @property
    def may_stop(self) -> bool:
        """Whether rows may propose fewer tokens than they are asked for."""
        return self.stop_below > 0 or self.context < context_of(self.target)

    @property
    def follows(self) -> bool:
        return self.stop_below > 0 and not self.watches

    def make_runner(self, model: PreTrainedModel, rows: int, *, optimize: bool, int8: bool) -> Runner:
        """What runs the drafter's forwards, with a cache of its own."""
        return Runner(model, rows, self.context, optimize=optimize, int8=int8)

    def start(self, row: int) -> None:
        self.known[row] = 0
        self.lagging = True

    def move(self, source: int, destination: int) -> None:
        if self.runner.cache.layers[0].is_initialized:  # else it has read nothing yet
            self.runner.cache.copy_prefix(source, destination, self.runner.length)
        self.known[destination] = self.known[source]

    def prepare(self, state: DraftState, count: int) -> None:
        """Read what the first step of a draft takes for granted, all but a row's last token."""
        self.lagging |= count == 0
        if self.lagging and count:
            self.check_known(state)
            self.catch_up(state)

    def check_known(self, state: DraftState) -> torch.Tensor:
        """`known` of the rows, int64 `[B]`: the last token but one may not be the drafted one, so what stands
        there is read again in any case.
        """
        known = self.known[: len(state.position)]
        return torch.minimum(known, state.position - 1, out=known)

    def draft(self, state: DraftState, count: int) -> Draft:
        if not self.begin(state, count):
            return Draft.none(state.position)
        batch = state.position.shape[0]
        prefix = state.prefix
        ids: list[torch.Tensor] = []
        probs = []
        reach = torch.ones(batch, device=state.position.device)
        proposed = torch.zeros_like(state.position)
        for step in range(count):
            going = (reach >= self.stop_below) & (state.position + step < self.context)
            if self.watches and self.may_stop and not going.any():
                break
            logits = self.next(ids[-1], step, state) if step else self.first(state)
            logits = self.adjust(logits, prefix)
            token, distribution, confidence = self.choose(logits, state.draws, step)
            going &= confidence == confidence  # a distribution that is not a number proposes nothing
            ids.append(token)
            probs.append(distribution)
            proposed += going
            reach = torch.where(going, reach * confidence, -1)
            prefix = prefix and prefix.followed_by(token)
        self.settle(state.position, len(ids) - 1)
        return Draft(torch.stack(ids, dim=1), proposed, None if self.argmax else torch.stack(probs, dim=1))

    def begin(self, state: DraftState, count: int) -> bool:
        """Whether this round drafts: not where nothing is asked for or, looked at on a CPU, every row is past
        the context.
        """
        self.check_known(state)
        if self.watches and self.may_stop and not (state.position < self.context).any():
            self.lagging = True
            return False
        return count > 0

    def settle(self, position: torch.Tensor, chained: int) -> None:
        """A draft is done, whose first `chained` tokens were read one behind the other."""
        self.known[: len(position)] = position + chained + 1

    def unread(self, end: torch.Tensor, least: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The positions int64 `[B, T]` that a first step reads, up to `end [B]` (exclusive): `least` of them
        or as many as the row with the most has not read; and where the last one stands among them, `[B]`.
        """
        lacking = torch.where(end <= self.context, end - self.known[: len(end)], least)
        width = max(int(lacking.max()), least)
        # A row past the context writes over its own last entries, which nothing reads any more.
        start = (end - width).clamp(min=0, max=self.context - width)
        places = start[:, None] + torch.arange(width, device=end.device)
        return places, (end - 1 - start).clamp(max=width - 1)

    def first(self, state: DraftState) -> torch.Tensor:
        """Logits `[B, Vd]` of the first drafted token.

        The step is two tokens wide: after a fully accepted round the cache lacks the last drafted token, and
        feeding it again otherwise writes the same entry. So no round needs an extra forward. (After a tree it
        reads what was accepted from where the tree branched on.)
        """
        before = (state.position - 1).clamp(min=0)
        pair = torch.stack((before, state.position), dim=1)
        return self.step(state.tokens.gather(1, pair), before, state.window)

    def first_behind_tree(self, state: DraftState) -> torch.Tensor:
        """The same where the last draft may have been a tree: what was accepted of it from where it branched
        on is read too.
        """
        places, last = self.unread(state.position + 1, 2)
        rows = slice(0, len(places))
        hidden = self.runner.forward(state.tokens.gather(1, places), places[:, 0], rows)
        return self.runner.logits(hidden[torch.arange(len(last), device=last.device), last])

    def next(self, token: torch.Tensor, step: int, state: DraftState) -> torch.Tensor:
        """Logits `[B, Vd]` of drafted token number `step` (from 0), after drafted `token` (int64 `[B]`)."""
        return self.step(token[:, None], state.position + step, state.window)

    def branch(
        self, tokens: torch.Tensor, parents: torch.Tensor, tree: Branches, state: DraftState
    ) -> torch.Tensor:
        """Logits `[B, W, Vd]` after columns of a tree, the drafted `tokens` (int64 `[B, W]`); `parents`
        `[B, W]` says behind which of the columns read last, or of the root, each stands.
        """
        start = state.position.clamp(max=self.runner.length - tree.places.shape[1])
        return self.runner.logits(self.runner.forward(tokens, start, slice(0, len(tokens)), tree))

    def room(self, position: torch.Tensor) -> int:
        """How many columns of a tree fit behind the rows' `position [B]`."""
        within = torch.where(position < self.context, position, 0)  # the others draft no more
        return self.runner.length - 1 - int(within.max())

    def step(self, inputs: torch.Tensor, start: torch.Tensor, window: int | None = None) -> torch.Tensor:
        """Logits `[B, Vd]` after the last of `inputs` (int64 `[B, T]`), whose first stands at `start`."""
        # A row past the context writes over its own last entries, which nothing reads any more. A slot
        # without a row may stand at 0.
        start = start.clamp(min=0, max=self.context - inputs.shape[1])
        window = window and min(window, self.runner.length)
        hidden = self.runner.forward(inputs, start, slice(0, len(inputs)), window=window)
        return self.runner.logits(hidden[:, -1])

    def timed_steps(self, batch_size: int, position: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """The first step of a draft and the ones after it, for a stopwatch: rows at a typical `position`."""
        ids = torch.full((batch_size, 2), 5, device=self.runner.device)
        at = torch.full((batch_size,), min(position, self.context - 2), device=self.runner.device)
        return (
            lambda: self.step(ids, at).argmax(dim=-1),
            lambda: self.step(ids[:, :1], at).argmax(dim=-1),
        )

    def timed_reading(self, length: int) -> Callable[[], Any]:
        """Reading a prompt of `length` tokens before a row's first draft, for a stopwatch."""
        ids = torch.full((min(length, self.context),), 5, device=self.runner.device)
        return lambda: self.runner.prefill([ids], 0, [0])

    def catch_up(self, state: DraftState) -> None:
        """Read the rows' text up to where a draft begins."""
        known, ends = self.known[: state.position.shape[0]].tolist(), state.position.tolist()
        lacking = [row for row, end in enumerate(ends) if known[row] < end - 1 and end < self.context]
        for first, last in neighbours(lacking):
            texts = [state.tokens[row, known[row] : ends[row]] for row in range(first, last + 1)]
            self.runner.prefill(texts, first, known[first : last + 1])
            self.known[first : last + 1] = state.position[first : last + 1]
        self.lagging = False

    def choose(
        self, logits: torch.Tensor, draws: Draws, step: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A token id `[B]`, the distribution `[B, V]` over target ids it was drawn from (empty for an
        argmax), and the drafter's probability of it `[B]`.
        """
        if self.argmax:
            confidence, index = logits.softmax(dim=-1).max(dim=-1)
            return index if self.vocab is None else self.vocab[index], logits.new_empty(0), confidence
        probs = probabilities(logits, self.options)
        if self.vocab is not None:
            full = probs.new_zeros(probs.shape[0], self.target_vocab_size)
            probs = full.index_copy_(1, self.vocab, probs)
        token = draws.draft(probs, step)
        return token, probs, probs.gather(1, token[:, None])[:, 0]


def neighbours(rows: Sequence[int]) -> list[tuple[int, int]]:
    """The first and last of every stretch of rows, in ascending order, that are next to each other."""
    firsts = [row for row in rows if row - 1 not in rows]
    return list(zip(firsts, [row for row in rows if row + 1 not in rows], strict=True))


def context_of(model: Runner | PreTrainedModel) -> int:
    """Positions that a model can read: what it was made for, in a runner at most what its cache holds."""
    if isinstance(model, Runner):
        return min(model.length, context_of(model.model))
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return sys.maxsize if limit is None else int(limit)
