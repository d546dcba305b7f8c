"""Every measure of one drafter, each a method that computes it anew; `evaluation.evaluate` says which are
taken and keeps them.

What is heavy is imported inside: the recipe imports `evaluation.evaluate`, and with it this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from data.records import Batch, Samples
    from data.signals import Signals
    from evaluation.acceptance import AcceptanceTable
    from evaluation.decoder.drafters import DraftModel
    from evaluation.decoder.engine import Request
    from evaluation.decoder.runner import Runner
    from evaluation.evaluate import EvaluateConfig, ServingConfig

SPLITS = ("seen", "unseen")
TRANSFORMERS_PROMPTS = 3  # transformers' plain path is slow and varies little: a few prompts place it
ACCEPTANCE_BATCH = 16
REPLAY_PROMPTS = 8
TURN = 8  # prompts that a decoder of batches answers before it is the next one's turn, or a whole batch
OTHER_PROMPTS = 16  # at batch sizes beside the serving one, or a whole batch


class Evaluation:
    """One target, one drafter and the test samples, ready to be measured."""

    def __init__(
        self,
        target: PreTrainedModel,
        eos_ids: Sequence[int],
        drafter: DraftModel,
        test: Samples,
        config: EvaluateConfig,
        serving: ServingConfig,
        seed: int,
        before: DraftModel | None = None,
        select: Samples | None = None,
    ) -> None:
        """`before` is the drafter that training started from, where that was one already: it races too.
        `select`: held-out samples by which a static tree is chosen.
        """
        from evaluation.decoder.kinds import make_drafter
        from evaluation.decoder.runner import Runner
        from evaluation.decoder.sampling import SamplingOptions

        self.model, self.eos_ids, self.drafter, self.test = target, eos_ids, drafter, test
        self.config, self.serving, self.seed, self.before = config, serving, seed, before
        self.select = select
        self.rates: list[list[float]] | None = None
        self.options = SamplingOptions(serving.temperature, serving.top_p)
        longest = max(sum(not bit for bit in record.completion_mask) for record in test)
        self.length = longest + config.max_new_tokens + config.widest + 1
        self.argmax = serving.draft_sampling == "argmax"
        self.runner: Runner = Runner(target, serving.batch_size, self.length)
        self.model_drafter = make_drafter(drafter, self.runner, self.options, argmax=self.argmax, int8=True)

    def acceptance_before(self, drafter: DraftModel) -> dict[str, Any]:
        """What an earlier `drafter` is accepted: the `rows` of `acceptance`, to compare with."""
        from evaluation.acceptance import summarise

        return {"rows": summarise(self._by_position(drafter)[0], list(self.test), seed=self.seed)}

    def acceptance(self) -> dict[str, Any]:
        """What the drafter is accepted, teacher-forced on the test samples: `rows` by split, temperature and
        task (of the first drafted token), `curves` by position and entropy, and `matches` by prompt in the
        serving mode, for the check on the decoder and the cost model.
        """
        from evaluation.acceptance import summarise
        from evaluation.acceptance_curves import curves, target_entropy
        from evaluation.head import head_of
        from evaluation.replay import draft_matches

        tables = self._by_position(self.drafter)
        entropy = target_entropy(
            head_of(self.model).detached(), self.test, self.serving.temperature or 1.0, self._live_signals()
        )
        count = self.config.num_speculative_tokens[-1]
        served = "greedy" if self.options.greedy else self.serving.draft_sampling
        return {
            "rows": summarise(tables[0], list(self.test), seed=self.seed),
            "curves": curves(tables, self.test, entropy, count, seed=self.seed),
            "matches": draft_matches(tables, self.test, served, self.serving.temperature, seed=self.seed),
        }

    def quantization_gap(self, full: PreTrainedModel) -> dict[str, Any]:
        """What the drafter is accepted by its quantised target and by the `full` one, on the same text."""
        from evaluation.quantization import acceptance_gap

        return acceptance_gap(
            self.drafter,
            self.model,
            full,
            self.test,
            temperature=self.serving.temperature or 1.0,
            seed=self.seed,
        )

    def _by_position(self, drafter: DraftModel) -> list[AcceptanceTable]:
        from evaluation.acceptance import by_position
        from evaluation.head import head_of

        return by_position(
            drafter,
            head_of(self.model).detached(),
            self.test,
            temperature=self.serving.temperature or 1.0,
            batch_size=ACCEPTANCE_BATCH,
            signals=self._live_signals(),
            target=self.model,
        )

    def _live_signals(self) -> Callable[[Batch], Signals] | None:
        """Asks the target for a batch's signals, where the samples carry none, or not its exact states."""
        from evaluation.signals import target_signals

        if self.test.has_exact_signals(self.model.dtype):
            return None
        return partial(target_signals, self.model, temperature=self.serving.temperature or 1.0)

    def prompts(self, split: str) -> dict[str, Request]:
        """The test prompts of a split by their id."""
        from evaluation.decoder.engine import Request

        requests: dict[str, Request] = {}
        for record in self.test.where(seen_template=split == "seen"):
            prompt = [i for i, bit in zip(record.input_ids, record.completion_mask, strict=True) if not bit]
            requests.setdefault(record.prompt_id, Request(prompt, self.config.max_new_tokens, record.seed))
        return dict(list(requests.items())[: self.config.prompts])

    def groups(self, split: str, size: int) -> list[list[Request]]:
        """The test prompts of a split for batches of `size`, in groups that are answered in one turn."""
        chosen, turn = list(self.prompts(split).values()), 1 if size == 1 else max(size, TURN)
        if size != self.serving.batch_size:
            chosen = chosen[: max(size, OTHER_PROMPTS)]
        return [chosen[first : first + turn] for first in range(0, len(chosen), turn)]

    def headline_split(self) -> str:
        """Seen templates, or unseen ones where no template was seen."""
        return "seen" if self.prompts("seen") else "unseen"

    def batches(self) -> int:
        """How many groups of prompts `run` decodes, each by every decoder."""
        others = (len(self.groups(self.headline_split(), size)) for size in self.other_batch_sizes())
        return sum(len(self.groups(split, self.serving.batch_size)) for split in SPLITS) + sum(others)

    def other_batch_sizes(self) -> list[int]:
        """The batch sizes to measure beside the serving one."""
        return [size for size in self.config.batch_sizes if size != self.serving.batch_size]

    @property
    def tree_is_static(self) -> bool:
        """Is its tree the same in every round, chosen by `rank_rates`?"""
        from evaluation.decoder.kinds import kind_of

        return self.config.tree and kind_of(self.drafter.model.config) == "medusa"

    def rank_rates(self) -> list[list[float]]:
        """How often each rank of each head was right on the samples held out for selection."""
        from evaluation.acceptance import rank_rates

        assert self.select is not None, "a static tree is chosen by held-out samples"
        settings: dict[str, Any] = {"temperature": self.serving.temperature, "batch_size": ACCEPTANCE_BATCH}
        signals = self._live_signals()
        ranks = self.config.widest
        return rank_rates(self.drafter, self.model, self.select, ranks, signals=signals, **settings)

    def decode(
        self,
        split: str,
        costs: dict[str, Any],
        counts: Sequence[int],
        on_group: Callable[[], None],
    ) -> dict[str, Any]:
        """Plain and speculative decoding of a split at the batch size of `costs`, interleaved: one row per
        drafter and K, and the plain latencies.
        """
        from evaluation.contestants import contestants
        from evaluation.replay import excess
        from evaluation.speed import drafting, latencies, race, speedup

        groups = self.groups(split, costs["batch_size"])
        if not groups:
            return {"plain": None, "rows": []}
        requests = [request for group in groups for request in group]
        timings = race(contestants(self, costs, counts), groups, on_group)
        plain = timings.pop("plain")
        rows = []
        for name, timing in timings.items():
            kind, count = name.split()
            rows.append(
                {
                    "drafter": kind,
                    "split": split,
                    "batch_size": costs["batch_size"],
                    "num_speculative_tokens": int(count),
                    "prompts": len(requests),
                    **drafting(timing, int(count), seed=self.seed),
                    **self.identity(requests, plain.outputs, timing.outputs),
                    **excess(timing.outputs),
                    "tokens_per_second": timing.tokens_per_second,
                    "plain_tokens_per_second": plain.tokens_per_second,
                    "speedup": speedup(plain, timing, seed=self.seed),
                    **latencies(timing),
                }
            )
        return {"plain": {"tokens_per_second": plain.tokens_per_second, **latencies(plain)}, "rows": rows}

    def replay(self, matches: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
        """The decoder's rounds against those that teacher-forced matches foretell, at temperature 0: with the
        drafter's weights as they were teacher-forced, not rounded to 8 bits, else rounds would only be alike.
        """
        from evaluation.decoder.engine import Decoder
        from evaluation.decoder.kinds import make_drafter
        from evaluation.replay import compare

        if not self.options.greedy:
            return None
        count = self.config.num_speculative_tokens[-1]
        decoder = Decoder(
            self.runner,
            eos_ids=self.eos_ids,
            options=self.options,
            drafter=make_drafter(self.drafter, self.runner, self.options),
            num_speculative_tokens=count,
        )
        chosen = dict(list(self.prompts(self.headline_split()).items())[:REPLAY_PROMPTS])
        by_prompt = zip(chosen, decoder.generate(list(chosen.values())), strict=True)
        return compare(matches, {name: (out.tokens, out.rounds) for name, out in by_prompt}, count)

    def identity(self, requests: list[Request], plain: Any, speculative: Any) -> dict[str, int | None]:
        """At temperature 0: how many outputs are plain decoding's, how many part at a near tie, how many by a
        bug.
        """
        from evaluation.lossless import compare_greedy, count_verdicts

        if not self.options.greedy:
            return {"identical_outputs": None, "near_ties": None, "bugs": None}
        verdicts = [
            compare_greedy(self.runner, request, a.tokens, b.tokens)
            for request, a, b in zip(requests, plain, speculative, strict=True)
        ]
        return {**count_verdicts(verdicts)}

    def certificate(self, costs: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
        """The losslessness certificate of the headline path (`evaluation.lossless`).

        At temperature 0 the outputs behind the decode `rows` of the drafter are its greedy part.
        """
        from evaluation.decoder.sampling import SamplingOptions
        from evaluation.lossless import DecodingPath, certify
        from evaluation.speed import stop_threshold

        own = [row for row in rows if row["drafter"] in ("model", "adaptive", "tree")]
        greedy = None
        if self.options.greedy:
            kinds = ("identical_outputs", "near_ties", "bugs")
            greedy = {kind: sum(row[kind] for row in own) for kind in kinds}
            greedy["outputs"] = sum(row["prompts"] for row in own)
        by_split = [[list(request.prompt) for request in self.prompts(split).values()] for split in SPLITS]
        prompts = [prompt for both in zip_longest(*by_split) for prompt in both if prompt is not None]
        path = DecodingPath(
            self.model,
            self.drafter,
            self.config.num_speculative_tokens[-1],
            self.argmax,
            stop_threshold(costs),
            prompts,
        )
        sampling = SamplingOptions(self.serving.temperature or 1.0, self.serving.top_p)
        return certify(path, sampling, greedy, seed=self.seed)

    def costs(self) -> dict[str, Any]:
        """The forwards of a round, timed alone."""
        from evaluation.speed import measure_costs

        counts = range(1, self.config.widest + 1)
        size, length = self.serving.batch_size, self.prompt_tokens()
        return measure_costs(self.runner, self.model_drafter, counts, size, prompt_tokens=length)

    def costs_by_batch(self) -> list[dict[str, Any]]:
        """The same at other batch sizes, at the widths of the measured K and where forwards get dearer
        fastest.
        """
        from evaluation.cost_model import BATCH_SIZES, STEEP, measure_by_batch

        counts = self.config.num_speculative_tokens
        counts = sorted({*counts, *(count for count in STEEP if count < counts[-1]), self.config.widest})
        sizes = sorted({*BATCH_SIZES, *self.config.batch_sizes} - {self.serving.batch_size})
        return measure_by_batch(self.model, self.drafter, counts, sizes, self.prompt_tokens())

    def prompt_tokens(self) -> int:
        """Tokens of a test prompt, on average."""
        lengths = [len(request.prompt) for split in SPLITS for request in self.prompts(split).values()]
        return round(sum(lengths) / len(lengths))

    def foretold(self, matches: dict[str, dict[str, Any]]) -> dict[int, dict[str, float]]:
        """By K from 0 on, what drafting comes to on the headline prompts, from teacher-forced `matches`."""
        from evaluation.replay import rounds_by_count

        told = [matches[name] for name in self.prompts(self.headline_split()) if name in matches]
        length = self.config.max_new_tokens
        texts = [[own[:length] for own in each["matches"]] for each in told or matches.values()]
        return rounds_by_count(texts, range(self.config.num_speculative_tokens[-1] + 1))

    def transformers_plain(self) -> float | None:
        """Tokens/s of transformers' own static-cache decoding, None where the serving mode has no counterpart
        there.
        """
        from evaluation.speed import transformers_tokens_per_second

        if not self.options.greedy or self.serving.batch_size > 1:
            return None
        requests = list(self.prompts(self.headline_split()).values())[:TRANSFORMERS_PROMPTS]
        return transformers_tokens_per_second(self.model, requests, self.eos_ids)
