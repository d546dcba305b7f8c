"""The decoder: plain and speculative decoding of a batch of ragged rows, one code path.

A round drafts up to K tokens per row, runs the target once over the last emitted token and the drafts (width
K + 1), accepts a prefix, and emits it with one token more. Plain decoding is the same round with no drafts.
Active rows are kept contiguous: a finished row's slot is refilled from the queue, or else taken by the last
active row.

Shapes: B active rows, K drafted tokens, S positions, V vocabulary, H hidden size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from data.errors import UserError
from evaluation.decoder.drafters import Drafter, DraftState
from evaluation.decoder.runner import Runner
from evaluation.decoder.sampling import SamplingOptions, Uniforms, draw, probabilities
from evaluation.decoder.verify import accept_probabilities, count_accepted, next_token_probs, verify_greedy


@dataclass(frozen=True)
class Request:
    """A prompt to continue."""

    prompt: Sequence[int]
    max_new_tokens: int
    seed: int = 0
    """Seeds the row's private stream of random numbers; unused at temperature 0."""


@dataclass
class States:
    """What the target knew when it chose each emitted token, kept on request: n tokens."""

    hidden: list[torch.Tensor] = field(default_factory=list)
    """pieces of `[n, H]`: the last hidden state after the final norm."""
    logits_summary: list[torch.Tensor] = field(default_factory=list)
    """pieces of float64 `[n, 2]`: log-sum-exp of the logits over the signal temperature, and the most likely
    id.
    """


@dataclass
class Output:
    """One finished row."""

    tokens: list[int]
    finish_reason: str
    """"stop" at an end-of-sequence token (included in `tokens`), "length" at max_new_tokens."""
    rounds: list[tuple[int, int]]
    """(proposed, accepted) drafts of every round."""
    truncated: int
    """Tokens of the last round that fell behind the end."""
    states: States


@dataclass
class Row:
    """A row in flight."""

    index: int
    request: Request
    tokens: list[int] = field(default_factory=list)
    rounds: list[tuple[int, int]] = field(default_factory=list)
    truncated: int = 0
    states: States = field(default_factory=States)

    def keep(self, hidden: torch.Tensor, summary: torch.Tensor) -> None:
        """Keep the states `[n, H]` and logits' summaries `[n, 2]` that the next n tokens come from."""
        self.states.hidden.append(hidden.clone())
        self.states.logits_summary.append(summary)


class Decoder:
    """Decodes requests with a target and, optionally, a drafter that proposes `num_speculative_tokens` per
    round.

    The output follows the target's own distribution, whatever the drafter: at temperature 0 it is plain
    decoding's output up to floating-point near ties between forwards of different widths.
    """

    def __init__(
        self,
        target: Runner,
        *,
        eos_ids: Sequence[int],
        options: SamplingOptions,
        drafter: Drafter | None = None,
        num_speculative_tokens: int = 0,
        keep_states: bool = False,
        signal_temperature: float = 1.0,
    ) -> None:
        """Decoders may share one `target` runner, as long as they take turns: a generation starts from empty
        rows.
        """
        if (drafter is None) != (num_speculative_tokens == 0):
            raise UserError(
                "speculative decoding needs a drafter and num_speculative_tokens >= 1; plain neither."
            )
        self.runner = target
        self.eos_ids = frozenset(eos_ids)
        self.options = options
        self.drafter = drafter
        self.count = num_speculative_tokens
        self.keep_states = keep_states
        self.signal_temperature = signal_temperature
        device, batch_size = target.device, target.cache.num_rows
        self.tokens = torch.zeros(batch_size, target.length + 1, dtype=torch.int64, device=device)
        self.position = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self.features = torch.zeros(batch_size, target.hidden_size, dtype=target.dtype, device=device)
        self.uniforms = Uniforms(batch_size, device)
        self.rows: list[Row] = []
        self.prefill_seconds = 0.0
        self.decode_seconds = 0.0
        self.drafter_prefill_seconds = 0.0

    @torch.inference_mode()
    def generate(
        self, requests: Sequence[Request], on_tokens: Callable[[int], None] | None = None
    ) -> list[Output]:
        """Outputs in the order of the requests. `on_tokens` hears the number of new tokens after every round.

        `prefill_seconds` and `decode_seconds` of the decoder tell afterwards where the time went.
        """
        for request in requests:
            self.check(request)
        shared = common_prefix([request.prompt for request in requests])
        queue = list(enumerate(requests))[::-1]
        outputs: dict[int, Output] = {}
        self.prefill_seconds = self.decode_seconds = 0.0
        self.rows = []
        while queue or self.rows:
            begin = time.perf_counter()
            while queue and len(self.rows) < self.tokens.shape[0]:
                self.start(Row(*queue.pop()), len(self.rows), shared if self.rows else 0)
                self.retire(len(self.rows) - 1, outputs)
            # The drafter's own prefill comes after the first token and is a cost of speculation.
            middle = time.perf_counter() - self.drafter_prefill_seconds
            self.drafter_prefill_seconds = 0.0
            before = sum(len(row.tokens) for row in self.rows)
            if self.rows:
                self.round()
            emitted = sum(len(row.tokens) for row in self.rows) - before
            for slot in reversed(range(len(self.rows))):
                self.retire(slot, outputs)
            self.prefill_seconds += middle - begin
            self.decode_seconds += time.perf_counter() - middle
            if on_tokens:
                on_tokens(emitted)
        return [outputs[index] for index in range(len(requests))]

    def check(self, request: Request) -> None:
        if not request.prompt:
            raise UserError("a prompt has no tokens; give at least one.")
        if request.max_new_tokens < 1:
            raise UserError(f"max_new_tokens is {request.max_new_tokens}; it must be at least 1.")
        needed = len(request.prompt) + request.max_new_tokens + self.count
        if needed > self.runner.length:
            raise UserError(
                f"a prompt of {len(request.prompt)} tokens with max_new_tokens {request.max_new_tokens} and "
                f"{self.count} drafts needs {needed} positions; this decoder has {self.runner.length}."
            )

    def start(self, row: Row, slot: int, shared: int) -> None:
        """Prefill a row into `slot` and emit its first token; `shared` leading tokens come from row 0."""
        prompt = torch.tensor(row.request.prompt, device=self.runner.device)
        if shared:
            self.runner.cache.copy_prefix(0, slot, shared)
        hidden = self.runner.prefill(prompt[shared:], slot, shared)
        self.uniforms.seed(slot, row.request.seed)
        self.tokens[slot, : len(prompt)] = prompt
        self.position[slot] = len(prompt)
        self.features[slot] = hidden[0]
        logits = self.runner.logits(hidden)
        if self.options.greedy:
            token = logits.argmax(dim=-1)
        else:
            uniform = torch.rand(1, generator=self.uniforms.generators[slot], dtype=torch.float64)
            token = draw(probabilities(logits, self.options), uniform.to(logits.device))
        self.tokens[slot, len(prompt)] = token[0]
        if self.keep_states:
            row.keep(hidden, self.summarise(logits))
        self.emit(row, token.tolist())
        if self.drafter:
            begin = time.perf_counter()
            self.drafter.start(slot, prompt)
            self.drafter_prefill_seconds += time.perf_counter() - begin
        self.rows.append(row)

    def round(self) -> None:
        """One round over the active rows: draft, verify, accept, emit."""
        batch = len(self.rows)
        position = self.position[:batch]
        # No draft is worth its cost beyond the longest row's end.
        left = max(row.request.max_new_tokens - len(row.tokens) for row in self.rows)
        count = min(self.count, left - 1)
        # As many numbers per round whatever the count: what plain decoding draws never depends on the batch.
        numbers = None if self.options.greedy else self.uniforms.next(batch, 2 * self.count + 1)
        drafted = self.tokens.new_zeros(batch, 0)
        proposed = torch.zeros_like(position)
        draft_probs = None
        if self.drafter and count:
            unused = torch.zeros(batch, count, dtype=torch.float64)
            state = DraftState(
                self.tokens[:batch],
                position,
                self.features[:batch],
                unused if numbers is None else numbers[:, :count],
            )
            draft = self.drafter.draft(state, count)
            drafted, proposed, draft_probs = draft.ids, draft.proposed, draft.probs

        last = self.tokens[:batch].gather(1, position[:, None])
        hidden = self.runner.forward(torch.cat((last, drafted), dim=1), position, slice(0, batch))
        logits = self.runner.logits(hidden)
        if numbers is None:
            target_ids = logits.argmax(dim=-1)
            accepted = verify_greedy(target_ids, drafted, proposed)
            token = target_ids.gather(1, accepted[:, None])
        else:
            target_probs = probabilities(logits, self.options)
            if draft_probs is None:
                draft_probs = torch.zeros_like(target_probs[:, :-1]).scatter_(2, drafted[..., None], 1)
            accept = accept_probabilities(target_probs, draft_probs, drafted)
            accepted = count_accepted(
                numbers[:, self.count : self.count + drafted.shape[1]] < accept, proposed
            )
            token = draw(next_token_probs(target_probs, draft_probs, accepted, proposed), numbers[:, -1])[
                :, None
            ]

        # Drafts and then the next token go behind the last token; what stands behind the next token is stale.
        slots = position[:, None] + self.runner.slots[1 : drafted.shape[1] + 1]
        self.tokens[:batch].scatter_(1, slots, drafted)
        position += accepted + 1
        self.tokens[:batch].scatter_(1, position[:, None], token)
        self.features[:batch] = hidden[torch.arange(batch, device=hidden.device), accepted]

        emitted = torch.cat((drafted, token), dim=1).tolist()
        summary = self.summarise(logits) if self.keep_states else None
        counts = zip(self.rows, proposed.tolist(), accepted.tolist(), strict=True)
        for slot, (row, offered, stood) in enumerate(counts):
            row.rounds.append((offered, stood))
            if summary is not None:
                row.keep(hidden[slot, : stood + 1], summary[slot, : stood + 1])
            self.emit(row, emitted[slot][:stood] + emitted[slot][-1:])

    def summarise(self, logits: torch.Tensor) -> torch.Tensor:
        """Log-normaliser at the signal temperature, and argmax, of logits `[..., V]`: float64 `[..., 2]`."""
        normaliser = (logits / self.signal_temperature).logsumexp(dim=-1)
        return torch.stack((normaliser.double(), logits.argmax(dim=-1).double()), dim=-1)

    def emit(self, row: Row, tokens: list[int]) -> None:
        """Append a round's tokens to a row, up to its end."""
        end = next((i + 1 for i, token in enumerate(tokens) if token in self.eos_ids), len(tokens))
        end = min(end, row.request.max_new_tokens - len(row.tokens))
        row.tokens += tokens[:end]
        row.truncated = len(tokens) - end

    def retire(self, slot: int, outputs: dict[int, Output]) -> None:
        """Move a row that has ended to the outputs; the last active row takes its slot."""
        row = self.rows[slot]
        stopped = row.tokens[-1] in self.eos_ids
        if not stopped and len(row.tokens) < row.request.max_new_tokens:
            return
        assert len(row.tokens) == 1 + sum(accepted + 1 for _, accepted in row.rounds) - row.truncated
        reason = "stop" if stopped else "length"
        outputs[row.index] = Output(row.tokens, reason, row.rounds, row.truncated, row.states)
        final = len(self.rows) - 1
        if slot != final:
            self.rows[slot] = self.rows[final]
            self.runner.cache.copy_prefix(final, slot, self.runner.length)
            self.tokens[slot], self.position[slot] = self.tokens[final], self.position[final]
            self.features[slot] = self.features[final]
            self.uniforms.move(final, slot)
            if self.drafter:
                self.drafter.move(final, slot)
        self.rows.pop()


def common_prefix(prompts: Sequence[Sequence[int]]) -> int:
    """Number of leading tokens that all prompts share, at least one short of the shortest prompt (0 for one
    prompt).
    """
    if len(prompts) < 2:
        return 0
    low, high = min(map(list, prompts)), max(map(list, prompts))
    limit = min(map(len, prompts)) - 1
    return next((i for i in range(limit) if low[i] != high[i]), limit)
