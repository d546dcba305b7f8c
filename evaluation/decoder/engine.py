"""The decoder: plain and speculative decoding of a batch of ragged rows, one code path.

A round drafts up to K tokens per row, runs the target once over the last emitted token and the drafts (width
K + 1), accepts some of them, and emits those with one token more. Plain decoding is the same round with no
drafts; drafts may form a tree, of which a chain is left once it is judged. Active rows are kept contiguous: a
finished row's slot is refilled from the queue, or else taken by the last active row.

What a round computes, `Decoder.play`, is a function of fixed shape over buffers, in which the host reads
nothing: a CPU runs it as it stands, a GPU as one captured graph. There the host reads a round's tokens while
the next one runs; what a row gets behind an end that the host had not seen yet is dropped.

Shapes: B active rows, K drafted tokens, S positions, V vocabulary, H hidden size.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from data.errors import UserError
from evaluation.decoder.accounting import Account
from evaluation.decoder.buffers import Buffers, Played, Readback
from evaluation.decoder.drafters import Draft, Drafter, DraftState, context_of
from evaluation.decoder.graphs import Graphs
from evaluation.decoder.guard import Guard
from evaluation.decoder.judge import UNSOUND, Judge, RuleName, Verdict
from evaluation.decoder.noise import Draws
from evaluation.decoder.penalties import Prefix
from evaluation.decoder.rows import Output, Request, Row, States, common_prefix, summarise
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
        wanted = num_speculative_tokens
        schedule = Schedule({1: wanted}) if isinstance(wanted, int) else wanted
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
        self.buffers = Buffers.of(target)
        captured = target.device.type == "cuda" and (drafter is None or drafter.capturable)
        self.graphs: Graphs[Played] | None = Graphs() if captured else None
        self.lag = 1 if captured else 0
        """Rounds that may be under way when the next one is launched."""
        self.under_way: deque[Readback] = deque()
        self.longest = schedule.most
        """Drafts of the row with the most in the last round that was read."""
        self.rows: list[Row] = []
        self.account = Account()
        self.rounds_by_steps: Counter[int] = Counter()
        self.columns_beside = 0  # by which all rounds' trees were wider than deep
        self.prefill_seconds = self.decode_seconds = 0.0

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
            request.check(self.context)
        shared = common_prefix([request.prompt for request in requests])
        waiting = list(enumerate(requests))[::-1]
        outputs: dict[int, Output] = {}
        places = self.runner.cache.num_rows
        self.prefill_seconds = self.decode_seconds = 0.0
        self.rounds_by_steps, self.columns_beside = Counter(), 0
        self.rows = []
        self.under_way.clear()
        self.buffers.end.zero_()
        while len(outputs) < len(requests):
            begin, emitted = time.perf_counter(), 0
            while not self.under_way and len(self.rows) < places and len(outputs) < len(requests):
                if not waiting and keep_full:
                    waiting = [(REPEAT, request) for request in reversed(requests)]
                if not waiting:
                    break
                # What the others share with the first row they get from there, so it is read by itself.
                free = places - len(self.rows) if self.rows or not shared else 1
                emitted += self.start([Row(*waiting.pop()) for _ in range(min(free, len(waiting)))], shared)
                self.retire(outputs)
            middle = time.perf_counter()
            active = list(self.rows)
            emitted += self.round(drain=(keep_full or bool(waiting)) and len(active) < places)
            self.retire(outputs)
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

    def start(self, fresh: list[Row], shared: int) -> int:
        """Prefill rows into the slots behind the active ones and emit their first tokens, whose number is
        returned; `shared` leading tokens come from row 0, where it is active.
        """
        begin, first, emitted = time.perf_counter(), len(self.rows), 0
        fresh.sort(key=lambda row: len(row.request.prompt))  # those of like length are read together
        prompts = [torch.tensor(row.request.prompt, device=self.runner.device) for row in fresh]
        rows = slice(first, first + len(fresh))
        shared = shared if first else 0
        if shared:
            self.runner.cache.copy_prefix(0, rows, shared)
        hidden = self.runner.prefill([prompt[shared:] for prompt in prompts], first, [shared] * len(fresh))
        for slot, (row, prompt) in enumerate(zip(fresh, prompts, strict=True), start=first):
            self.buffers.start(slot, row.request, prompt)
        logits = self.runner.logits(hidden)[:, None]
        draft = Draft.none(self.buffers.position[rows])
        verdict = self.judge(logits, draft, self.draws(rows), self.prefix(rows))
        self.buffers.advance(rows, draft.ids, verdict.token, verdict.accepted, hidden[:, None])
        summary = summarise(logits, self.signal_temperature) if self.keep_states else None
        for place, (row, token) in enumerate(zip(fresh, verdict.token.tolist(), strict=True)):
            if summary is not None:
                row.keep(hidden[place : place + 1], summary[place])
            emitted += self.emit(row, [token])
            if self.drafter:
                self.drafter.start(first + place)
            row.seconds.prefill = time.perf_counter() - begin
        self.longest = self.schedule.most
        self.rows += fresh
        return emitted

    def round(self, drain: bool) -> int:
        """Launch a round over the active rows, unless none can need it, and read those that are due, all of
        them to `drain`; the number of tokens that were read.
        """
        flying = len(self.under_way)
        due = flying
        if self.rows and not (flying and drain) and max(row.left for row in self.rows) > flying:
            count = self.count()
            if count is not None:
                self.under_way.append(self.launch(count))
                due = flying + 1 - self.lag
        return sum(self.read(self.under_way.popleft()) for _ in range(due))

    def count(self) -> int | None:
        """How many tokens to draft now: none where they could not be used or do not pay. None where that
        depends on rounds under way.
        """
        if not self.drafter:
            return 0
        most = self.schedule.count(len(self.rows))
        room = self.context - 1 - self.furthest()  # no draft fits behind the last position
        if self.under_way and room < most:
            return None
        if self.graphs is None:  # no draft is worth its cost beyond the longest row's end
            most = min(most, max(row.left for row in self.rows) - len(self.under_way) - 1)
        if self.drafter.follows:
            most = min(most, self.longest + 1)
        return 0 if self.guard and not self.guard.drafts else min(most, room)

    def furthest(self) -> int:
        """A position that no row's last token is past, rounds under way included."""
        ahead = sum(late.most for late in self.under_way)
        return max(min(row.position + ahead, row.last - 1) for row in self.rows)

    def launch(self, count: int) -> Readback:
        """Start a round of `count` drafts."""
        size = len(self.rows)
        if self.graphs is not None:  # few sizes, so few graphs: slots without a row are frozen
            size = min(1 << (size - 1).bit_length(), self.runner.cache.num_rows)
        active = slice(0, size)
        window = self.runner.window(self.furthest() + count + 1)
        if self.drafter:
            self.drafter.prepare(self.buffers.state(active, self.draws(active), None, window), count)
        play = partial(self.play, active, count, window)
        played = play() if self.graphs is None else self.graphs((size, count, window), play)
        return Readback(played, self.rows, count + 1)

    def play(self, active: slice, count: int, window: int) -> Played:
        """Draft, verify, accept, and move the rows on; `window` cache slots hold all of that."""
        position, prefix = self.buffers.position[active], self.prefix(active)
        state = self.buffers.state(active, self.draws(active), prefix, window)
        draft = self.draft(state, count)
        tree = draft if isinstance(draft, DraftTree) else None
        last = self.buffers.tokens[active].gather(1, position[:, None])
        # A frozen row may stand at the last slot; what it writes before that nothing reads.
        root = position.clamp(max=self.runner.length - 1 - draft.ids.shape[1])
        hidden = self.runner.forward(
            torch.cat((last, draft.ids), dim=1), root, active, tree, None if tree else window
        )
        logits = self.runner.logits(hidden)
        verdict = self.judge(logits, draft, self.draws(active), prefix)
        ids, path = draft.ids, verdict.path
        assert (tree is None) == (path is None), "a tree's verdict is a path"
        if tree is not None and path is not None:  # what a tree leaves of itself is a chain
            self.runner.cache.keep(active, position[:, None] + tree.places.gather(1, path), position)
            ids = ids.gather(1, (path[:, 1:] - 1).clamp(min=0))
            hidden = along(hidden, path)
            if self.keep_states:
                logits = along(logits, path)
        self.buffers.advance(active, ids, verdict.token, verdict.accepted, hidden)
        lengths = draft.lengths
        counts = torch.stack((verdict.token, verdict.accepted, lengths, draft.proposed - lengths), dim=1)
        expected = [value.double() for value in verdict.expected.values()]
        return Played(
            numbers=torch.cat((ids, counts), dim=1),
            expected=torch.stack(expected) if expected else torch.zeros(0, device=ids.device),
            rules=tuple(verdict.expected),
            steps=draft.steps,
            siblings=draft.ids.shape[1] - draft.steps,
            states=(hidden, summarise(logits, self.signal_temperature)) if self.keep_states else (),
        )

    def draft(self, state: DraftState, count: int) -> Draft:
        """This round's drafts, of each row as many as it may use."""
        if not self.drafter:
            return Draft.none(state.position)
        draft = self.drafter.draft(state, count)
        if isinstance(draft, DraftTree):  # behind the last slot is no place for its siblings
            draft = draft.first(self.runner.length - 1 - max(row.position for row in self.rows))
        if draft.ids.shape[1] and state.left is not None:  # not more where a row's neighbours go on longer
            draft.limit(state.left)
        return draft

    def read(self, late: Readback) -> int:
        """Give rows the tokens of a round, and the guard its yield; the number of tokens."""
        numbers, expected = late.numbers(), late.expected()
        emitted, yielded = 0, []
        for slot, row in enumerate(late.rows):
            if row.finish_reason:  # at an end that was found when this round was under way
                continue
            *ids, token, stood, proposed, siblings = numbers[slot]
            row.rounds.append((proposed, stood))
            row.siblings += siblings
            for name, values in expected.items():
                row.expected[name] = row.expected.get(name, 0.0) + values[slot]
            if late.states:
                hidden, summary = late.states
                row.keep(hidden[slot, : stood + 1], summary[slot, : stood + 1])
            emitted += self.emit(row, [*ids[:stood], token])
            yielded.append(stood + 1)
            self.longest = max(proposed, self.longest if len(yielded) > 1 else 0)
        self.rounds_by_steps[late.steps] += bool(yielded)
        self.columns_beside += late.siblings * bool(yielded)
        if self.guard and yielded:
            self.guard.record(late.steps, late.siblings, sum(yielded) / len(yielded))
        return emitted

    def draws(self, active: slice) -> Draws:
        return Draws(self.buffers.seeds[active], self.buffers.position[active], self.shared_noise)

    def prefix(self, active: slice) -> Prefix | None:
        return self.buffers.prefix(active, self.runner.vocab_size) if self.options.penalises else None

    def emit(self, row: Row, tokens: list[int]) -> int:
        """Append a round's tokens to a row, up to its end; their number."""
        if tokens[-1] == UNSOUND:
            raise UserError(
                f"the target's logits are not finite at position {row.position + 1} of request {row.index}: "
                "its weights or their dtype overflow. Load it in another dtype."
            )
        end, row.finish_reason = self.stop.cut(row.tokens, tokens, row.request.max_new_tokens)
        row.tokens += tokens[:end]
        row.truncated = len(tokens) - end
        return end

    def retire(self, outputs: dict[int, Output]) -> None:
        """Move the rows that have ended to the outputs; the last active row takes such a slot."""
        for slot in reversed(range(len(self.rows))):
            row, final = self.rows[slot], len(self.rows) - 1
            if not row.finish_reason:
                continue
            if self.keep_states and self.runner.tapped:
                row.states.features = self.runner.features[slot, : row.position].clone()
            output = row.output()
            output.account.check()
            if row.index != REPEAT:
                outputs[row.index] = output
            if slot != final:
                self.rows[slot] = self.rows[final]
                self.runner.cache.copy_prefix(final, slot, self.runner.length)
                self.buffers.move(final, slot)
                if self.drafter:
                    self.drafter.move(final, slot)
            self.buffers.freeze(final)
            self.rows.pop()
