"""What the decoder may accept at most, from outside its verification: an excess is a bug, not good news.

Where it samples, the rule's own mean over its uniform numbers, on the same states (`excess`). At temperature
0, rounds replayed from teacher-forced matches, to the token (`compare`).

At temperature 0 a drafted token stands while it is the target's argmax, and accepted drafts leave the same
text that the drafter was teacher-forced on. So where each draft matches is known beforehand, and a decoder
that accepts more than that has a bug; near ties, in either model, move a few prompts either way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from data.records import Samples
    from evaluation.acceptance import AcceptanceTable
    from evaluation.decoder.engine import Output

ALPHA = 0.01
EXCESS_ALPHA = 0.001  # an evaluation tests a dozen rows, and would else cry wolf once in ten times


def draft_matches(
    tables: Sequence[AcceptanceTable], samples: Samples, measure: str, temperature: float, *, seed: int
) -> dict[str, dict[str, Any]]:
    """For each prompt that was sampled at `temperature`, or else at the one next to it: its `tokens`, and
    `matches`, a "1" for each token at which a draft would be accepted by `measure`, "0" for the others; one
    such string per table, which is one per position in a draft.

    Greedy ones are certain; the others are drawn, each token with its chance.
    """
    order = torch.argsort(tables[0].sample, stable=True)
    sizes = torch.bincount(tables[0].sample, minlength=len(samples)).tolist()
    chance = torch.rand(len(tables), len(order), generator=torch.Generator().manual_seed(seed))
    drawn = [own < getattr(table, measure) for own, table in zip(chance, tables, strict=True)]
    columns = [own[order].split(sizes) for own in drawn]
    nearest = min((record.temperature for record in samples), key=lambda value: abs(value - temperature))
    found: dict[str, dict[str, Any]] = {}
    for record, *positions in zip(samples, *columns, strict=True):
        if record.temperature == nearest and record.prompt_id not in found:
            marked = zip(record.input_ids, record.completion_mask, strict=True)
            tokens = [token for token, bit in marked if bit]
            found[record.prompt_id] = {
                "tokens": tokens,
                "matches": ["".join(str(int(bit)) for bit in own.tolist()) for own in positions],
            }
    return found


def replay(matches: Sequence[str], count: int) -> list[int]:
    """Accepted drafts of each round with `count` drafts over a text, the last round left out: it may end
    before its drafts do. The text's first token comes from the prefill.

    `matches`: where the first, second, ... draft of a round matches; the last one goes for all after it.
    """
    accepted, place, length = [], 1, len(matches[0])
    while place < length:
        lead = 0
        while lead < min(count, length - place) and matches[min(lead, len(matches) - 1)][place + lead] == "1":
            lead += 1
        accepted.append(lead)
        place += lead + 1
    return accepted[:-1]


def rounds_by_count(texts: Sequence[Sequence[str]], counts: Sequence[int]) -> dict[int, dict[str, float]]:
    """What `counts` drafts a round come to over texts with known matches, to their very end: by count,
    `tokens_per_target_call` and `rounds_per_text`.
    """
    long = [own for own in texts if len(own[0]) > 1]  # else the prefill gives all of it
    tokens = sum(len(own[0]) - 1 for own in long)
    found = {}
    for count in counts:
        rounds = sum(len(replay(own, count)) + 1 for own in long)
        found[count] = {"tokens_per_target_call": tokens / rounds, "rounds_per_text": rounds / len(long)}
    return found


def compare(
    expected: Mapping[str, Mapping[str, Any]],
    outputs: Mapping[str, tuple[Sequence[int], Sequence[tuple[int, int]]]],
    count: int,
) -> dict[str, Any]:
    """The decoder's rounds against the replayed ones, over prompts whose text is the same.

    `outputs`: tokens and (proposed, accepted) rounds by prompt. `more` and `fewer` count prompts where the
    decoder accepted more or fewer drafts than replayed. `p_value` is the chance of so many more where both
    are equally likely, as near ties make them; below ALPHA, `bug` is true.
    """
    from scipy.stats import binomtest

    more = fewer = same = accepted = replayed = 0
    for prompt, (tokens, rounds) in outputs.items():
        told = expected.get(prompt)
        if told is None or list(told["tokens"][: len(tokens)]) != list(tokens):
            continue
        wanted = replay([own[: len(tokens)] for own in told["matches"]], count)
        found = [stood for _, stood in rounds][: len(wanted)]
        accepted += sum(found)
        replayed += sum(wanted)
        same += found == wanted
        more += sum(found) > sum(wanted)
        fewer += found != wanted and sum(found) <= sum(wanted)
    p_value = float(binomtest(more, more + fewer, 0.5, alternative="greater").pvalue) if more else 1.0
    return {
        "prompts": more + fewer + same,
        "same_rounds": same,
        "more": more,
        "fewer": fewer,
        "accepted": accepted,
        "replayed": replayed,
        "p_value": p_value,
        "bug": p_value < ALPHA,
    }


def excess(outputs: Sequence[Output]) -> dict[str, Any]:
    """Drafts accepted against the mean of the rule that judged them, given the same states and drafts.

    `expected_accepted` by rule (others than the one in use for comparison: the block rule rightly exceeds the
    token rule), `excess_p_value`: the chance of at least so many more, by Student's one-sided t test over
    outputs, whose differences have mean 0; below EXCESS_ALPHA, `excess_bug` is true.
    """
    from scipy.stats import t

    accounts = [output.account for output in outputs if output.expected]
    rules = sorted({rule for account in accounts for rule in account.expected})
    totals = {rule: sum(account.expected.get(rule, 0.0) for account in accounts) for rule in rules}
    found: dict[str, Any] = {"expected_accepted": totals, "excess_p_value": 1.0, "excess_bug": False}
    if len(accounts) < 2:
        return found
    # Each round was judged by one rule; the token rule stands beside the block rule for comparison only.
    used = [rule for rule in rules if rule != "token"]
    means = [sum(account.expected.get(rule, 0.0) for rule in used) for account in accounts]
    gaps = np.array([account.accepted for account in accounts]) - np.array(means)
    spread = gaps.std(ddof=1) / np.sqrt(len(gaps))
    if spread > 0:
        found["excess_p_value"] = float(t.sf(gaps.mean() / spread, len(gaps) - 1))
    elif gaps.mean() > 0:
        found["excess_p_value"] = 0.0
    return {**found, "excess_bug": found["excess_p_value"] < EXCESS_ALPHA}
