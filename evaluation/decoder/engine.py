"""The decoder: plain and speculative decoding of a batch of ragged rows, one code path.

A round drafts up to K tokens per row, runs the target once over the last emitted token and the drafts (width
K + 1), accepts some of them, and emits those with one token more. Plain decoding is the same round with no
drafts; drafts may form a tree, of which a chain is left once it is judged. Active rows are kept contiguous: a
finished row's slot is refilled from the queue, or else taken by the last active row.

Shapes: B active rows, K drafted tokens, S positions, V vocabulary, H hidden size.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from data.errors import UserError
from evaluation.decoder.accounting import Account
from evaluation.decoder.drafters import Draft, Drafter, DraftState, context_of
from evaluation.decoder.guard import Guard
from evaluation.decoder.judge import UNSOUND, Judge, RuleName, Verdict
from evaluation.decoder.noise import Draws, signed
from evaluation.decoder.penalties import Prefix
from evaluation.decoder.rows import Output, Request, Row, States
from evaluation.decoder.runner import Runner
from evaluation.decoder.sampling import SamplingOptions
from evaluation.decoder.schedule import Schedule
from evaluation.decoder.stop import StopRules
from evaluation.decoder.tree import DraftTree, along

__all__ = ["Decoder", "Output", "Request", "States", "common_prefix"]

REPEAT = -1  # index of a row that only keeps the batch full


class Decoder:
    """Decodes requests with a target and, optionally, a drafter that proposes `num_speculative_tokens` per
    round: one number, or a `Schedule` of them by batch size.

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
        num_speculative_tokens: int | Schedule = 0,
        rule: RuleName = "block",
        guard: Guard | None = None,
        stop_strings: Sequence[str] = (),
        tokenizer: Any = None,
        keep_states: bool = False,
        signal_temperature: float = 1.0,
    ) -> None:
        """Decoders may share one `target` runner, as long as they take turns: a generation starts from empty
        rows.

        `rule` judges drafts that were drawn. Drafts that were chosen have the one-hot rule, greedy decoding
        the match. "shared_noise" draws the token of each position with numbers of that position alone, which
        the drafter uses too: speculative sampling then gives plain sampling's very tokens (of a decoder with
        the same rule). It accepts less than the others and draws a number per id. `stop_strings` are looked
        for in the answer's text, as `tokenizer` decodes it.
        """
        schedule = num_speculative_tokens
        if isinstance(schedule, int):
            schedule = Schedule({1: schedule})
        if (drafter is None) != (schedule.most == 0):
            raise UserError(
                "speculative decoding needs a drafter and num_speculative_tokens >= 1; plain neither."
            )
        if guard and len(guard.costs) <= schedule.most:
            raise UserError(
                f"the guard knows the costs of up to {len(guard.costs) - 1} drafts, but "
                f"num_speculative_tokens is {schedule.most}; measure costs up to that."
            )
        self.runner = target
        self.stop = StopRules(eos_ids, stop_strings, tokenizer)
        self.options = options
        self.judge: Callable[..., Verdict] = Judge(options, rule, target.vocab_size, target.device)
        self.drafter = drafter
        self.schedule = schedule
        self.shared_noise = rule == "shared_noise"
        self.guard = guard
        self.keep_states = keep_states
        self.signal_temperature = signal_temperature
        self.context = context_of(target)
        device, batch_size = target.device, target.cache.num_rows
        self.tokens = torch.zeros(batch_size, target.length + 1, dtype=torch.int64, device=device)
        self.position = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self.prompt_length = torch.zeros_like(self.position)
        self.seeds = torch.zeros_like(self.position)
        self.features = torch.zeros(batch_size, target.hidden_size, dtype=target.dtype, device=device)
        self.rows: list[Row] = []
        self.account = Account()
        self.rounds_by_steps: Counter[int] = Counter()
        self.prefill_seconds = 0.0
        self.decode_seconds = 0.0

    @torch.inference_mode()
    def generate(
        self,
        requests: Sequence[Request],
        on_tokens: Callable[[int], None] | None = None,
        *,
        keep_full: bool = False,
    ) -> list[Output]:
        """Outputs in the order of the requests. `on_tokens` hears the number of new tokens after every round.

        `keep_full`: a slot that comes free when no request waits is given to a repeat of one, which is
        dropped. So the last answers share the target with as many rows as the first, as under steady load.

        `prefill_seconds` and `decode_seconds` of the decoder tell afterwards where the time went (what the
        drafter reads of a prompt is a cost of decoding), `rounds_by_steps` how many rounds took so many
        draft steps, and `account` what became of the drafts.
        """
        for request in requests:
            self.check(request)
        shared = common_prefix([request.prompt for request in requests])
        waiting = list(enumerate(requests))[::-1]
        outputs: dict[int, Output] = {}
        self.prefill_seconds = self.decode_seconds = 0.0
        self.rounds_by_steps = Counter()
        self.rows = []
        while len(outputs) < len(requests):
            begin = time.perf_counter()
            while len(self.rows) < self.tokens.shape[0] and len(outputs) < len(requests):
                if not waiting and keep_full:
                    waiting = [(REPEAT, request) for request in reversed(requests)]
                if not waiting:
                    break
                row, turn = Row(*waiting.pop()), time.perf_counter()
                self.start(row, len(self.rows), shared if self.rows else 0)
                row.seconds.prefill = time.perf_counter() - turn
                self.retire(len(self.rows) - 1, outputs)
            middle = time.perf_counter()
            active = list(self.rows)
            before = sum(len(row.tokens) for row in active)
            if active:
                self.round()
            emitted = sum(len(row.tokens) for row in active) - before
            for slot in reversed(range(len(active))):
                self.retire(slot, outputs)
            spent = time.perf_counter() - middle
            for row in active:
                row.seconds.decode += spent
                row.seconds.share += spent / len(active)
            self.prefill_seconds += middle - begin
            self.decode_seconds += spent
            if on_tokens:
                on_tokens(emitted)
        self.account = Account.total(output.account for output in outputs.values())
        self.account.check()
        return [outputs[index] for index in range(len(requests))]

    def check(self, request: Request) -> None:
        if not request.prompt:
            raise UserError("a prompt has no tokens; give at least one.")
        if request.max_new_tokens < 1:
            raise UserError(f"max_new_tokens is {request.max_new_tokens}; it must be at least 1.")
        needed = len(request.prompt) + request.max_new_tokens - 1  # the last token is not read
        if needed > self.context:
            raise UserError(
                f"a prompt of {len(request.prompt)} tokens with max_new_tokens {request.max_new_tokens} "
                f"needs {needed} positions; this decoder has {self.context}. Shorten one of them."
            )

    def start(self, row: Row, slot: int, shared: int) -> None:
        """Prefill a row into `slot` and emit its first token; `shared` leading tokens come from row 0."""
        prompt = torch.tensor(row.request.prompt, device=self.runner.device)
        if shared:
            self.runner.cache.copy_prefix(0, slot, shared)
        hidden = self.runner.prefill(prompt[shared:], slot, shared)
        self.tokens[slot, : len(prompt)] = prompt
        self.prompt_length[slot] = len(prompt)
        self.position[slot] = len(prompt) - 1
        self.seeds[slot] = signed(row.request.seed)
        rows = slice(slot, slot + 1)
        logits = self.runner.logits(hidden)[:, None]
        draft = Draft.none(self.position[rows])
        verdict = self.judge(logits, draft, self.draws(rows), self.prefix(rows))
        self.position[slot] = len(prompt)
        self.features[slot] = hidden[0]
        self.tokens[slot, len(prompt)] = verdict.token[0]
        if self.keep_states:
            row.keep(hidden, self.summarise(logits[:, 0]))
        self.emit(row, verdict.token.tolist())
        if self.drafter:
            self.drafter.start(slot)
        self.rows.append(row)

    def round(self) -> None:
        """One round over the active rows: draft, verify, emit."""
        active = slice(0, len(self.rows))
        position = self.position[active]
        draft = self.draft(active)
        last = self.tokens[active].gather(1, position[:, None])
        tree = draft if isinstance(draft, DraftTree) else None
        hidden = self.runner.forward(torch.cat((last, draft.ids), dim=1), position, active, tree)
        logits = self.runner.logits(hidden)
        verdict = self.judge(logits, draft, self.draws(active), self.prefix(active))
        ids, path = draft.ids, verdict.path
        assert (tree is None) == (path is None), "a tree's verdict is a path"
        if tree is not None and path is not None:  # what a tree leaves of itself is a chain
            self.runner.cache.keep(active, position[:, None] + tree.places.gather(1, path), position)
            ids = ids.gather(1, (path[:, 1:] - 1).clamp(min=0))
            hidden = along(hidden, path)
            if self.keep_states:
                logits = along(logits, path)

        # Drafts and then the next token go behind the last token; what stands behind the next token is stale.
        slots = position[:, None] + self.runner.slots[1 : ids.shape[1] + 1]
        self.tokens[active].scatter_(1, slots, ids)
        position += verdict.accepted + 1
        self.tokens[active].scatter_(1, position[:, None], verdict.token[:, None])
        self.features[active] = hidden[torch.arange(len(self.rows), device=hidden.device), verdict.accepted]

        self.rounds_by_steps[draft.steps] += 1
        proposed, accepted = draft.lengths.tolist(), verdict.accepted.tolist()
        siblings = (draft.proposed - draft.lengths).tolist()
        emitted = torch.cat((ids, verdict.token[:, None]), dim=1).tolist()
        expected = {name: values.tolist() for name, values in verdict.expected.items()}
        summary = self.summarise(logits) if self.keep_states else None
        for slot, row in enumerate(self.rows):
            stood = accepted[slot]
            row.rounds.append((proposed[slot], stood))
            row.siblings += siblings[slot]
            for name, values in expected.items():
                row.expected[name] = row.expected.get(name, 0.0) + values[slot]
            if summary is not None:
                row.keep(hidden[slot, : stood + 1], summary[slot, : stood + 1])
            self.emit(row, emitted[slot][:stood] + emitted[slot][-1:])
        if self.guard:
            beside = draft.ids.shape[1] - draft.steps
            self.guard.record(draft.steps, beside, 1 + sum(accepted) / len(self.rows))

    def draft(self, active: slice) -> Draft:
        """This round's drafts: none where they could not be used or do not pay."""
        position = self.position[active]
        if not self.drafter:
            return Draft.none(position)
        left = [row.left - 1 for row in self.rows]
        # No draft is worth its cost beyond the longest row's end, and none fits behind the last position.
        room = min(self.context - 1 - row.position for row in self.rows)
        count = min(self.schedule.count(len(self.rows)), max(left), room)
        if self.guard and not self.guard.drafts:
            count = 0
        state = DraftState(
            self.tokens[active], position, self.features[active], self.draws(active), self.prefix(active)
        )
        draft = self.drafter.draft(state, count)
        if isinstance(draft, DraftTree):  # behind the last slot is no place for its siblings
            draft = draft.first(self.runner.length - 1 - max(row.position for row in self.rows))
        if min(left) < draft.ids.shape[1]:  # a row's drafts do not depend on how long its neighbours go on
            draft.limit(torch.tensor(left, device=position.device))
        return draft

    def draws(self, active: slice) -> Draws:
        return Draws(self.seeds[active], self.position[active], self.shared_noise)

    def prefix(self, active: slice) -> Prefix | None:
        if not self.options.penalises:
            return None
        return Prefix.of(
            self.tokens[active], self.prompt_length[active], self.position[active], self.runner.vocab_size
        )

    def summarise(self, logits: torch.Tensor) -> torch.Tensor:
        """Log-normaliser at the signal temperature, and argmax, of logits `[..., V]`: float64 `[..., 2]`."""
        normaliser = (logits / self.signal_temperature).logsumexp(dim=-1)
        return torch.stack((normaliser.double(), logits.argmax(dim=-1).double()), dim=-1)

    def emit(self, row: Row, tokens: list[int]) -> None:
        """Append a round's tokens to a row, up to its end."""
        if tokens[-1] == UNSOUND:
            raise UserError(
                f"the target's logits are not finite at position {row.position + 1} of request {row.index}: "
                "its weights or their dtype overflow. Load it in another dtype."
            )
        end, row.finish_reason = self.stop.cut(row.tokens, tokens, row.request.max_new_tokens)
        row.tokens += tokens[:end]
        row.truncated = len(tokens) - end

    def retire(self, slot: int, outputs: dict[int, Output]) -> None:
        """Move a row that has ended to the outputs; the last active row takes its slot."""
        row = self.rows[slot]
        if not row.finish_reason:
            return
        output = row.output()
        output.account.check()
        if row.index != REPEAT:
            outputs[row.index] = output
        final = len(self.rows) - 1
        if slot != final:
            self.rows[slot] = self.rows[final]
            self.runner.cache.copy_prefix(final, slot, self.runner.length)
            for state in (self.tokens, self.position, self.prompt_length, self.seeds, self.features):
                state[slot] = state[final]
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
