"""What an evaluation means, in a sentence, and the one threshold by which it is decided.

Speculation pays where the whole interval of the measured speedup lies above 1 and the drafter has not lost
its certificate; it does not pay where the interval lies below 1; between the two nothing is claimed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from evaluation.measures import best_decode, drafts_label, split_label

Standing = Literal["pays", "unclear", "does not pay"]
_WHERE = {
    "seen templates": "known templates with new content",
    "unseen templates": "templates it has never seen",
    "new prompts of known sources": "new prompts of the sources it was trained on",
}


def standing(speedup: Mapping[str, float]) -> Standing:
    """Which side of 1 the interval of a speedup lies on."""
    if speedup["low"] > 1:
        return "pays"
    return "does not pay" if speedup["high"] < 1 else "unclear"


def pays(evaluation: Mapping[str, Any]) -> bool:
    """Does serving this drafter pay where it was measured?"""
    return is_lossless(evaluation) is not False and standing(evaluation["best"]["speedup"]) == "pays"


def is_lossless(evaluation: Mapping[str, Any]) -> bool | None:
    """What the certificate says; None where there is none."""
    certificate = evaluation.get("certificate")
    return None if certificate is None else bool(certificate["holds"])


def verdict(evaluation: Mapping[str, Any]) -> str:
    """What to do with this drafter on this machine: K, batch size, speedup with its interval, and where to
    stop.
    """
    if is_lossless(evaluation) is False:
        return f"Do not serve: {' '.join(evaluation['certificate']['reasons'])}"
    best, row = evaluation["best"], best_decode(evaluation)
    batch = (evaluation.get("serving") or {}).get("batch_size", 1)
    speedup = best["speedup"]
    measured = (
        f"{speedup['mean']:.2f}x, 95 % interval {speedup['low']:.2f}-{speedup['high']:.2f}, over the fastest "
        f"plain path on {_WHERE[split_label(evaluation, best['split'])]}"
    )
    if row.get("tokens_per_second"):
        rates = f"{row['plain_tokens_per_second']:.1f} -> {row['tokens_per_second']:.1f} tokens/s"
        measured += f" ({rates}, {row['prompts']} prompts)"
    drafts = drafts_label(best)
    decided = standing(speedup)
    if decided == "pays":
        return f"Serve with {drafts} at batch {batch}: {measured}{_limit(evaluation)}."
    if decided == "unclear":
        return f"No clear gain on this machine with {drafts} at batch {batch}: {measured}."
    return f"Do not speculate on this machine at batch {batch}: with {drafts} it measured {measured}."


def why(evaluation: Mapping[str, Any]) -> str:
    """Where the gain goes: tokens per target call against what drafting and checking cost."""
    cost, row = evaluation["cost"], best_decode(evaluation)
    count = evaluation["best"]["num_speculative_tokens"]
    if evaluation.get("kind") == "medusa":  # all its drafts come in the first step
        share = cost["first_draft_step_ms"] / cost["target_step_ms"]
        drafting = f"drafting costs {share:.2f}"
    else:
        drafting = f"a draft step costs {cost['cost_ratio']:.2f}"
    return (
        f"A target call yields {row['tokens_per_target_call']['mean']:.2f} tokens, {drafting} "
        f"of a target step, and checking {count} tokens adds "
        f"{float(cost['verify_overhead'][str(count)]):.2f}."
    )


def _limit(evaluation: Mapping[str, Any]) -> str:
    """From which batch size on not to: as measured, or where nothing was, by the cost model."""
    others = evaluation.get("batches") or []
    if others:
        listed = ", ".join(
            f"{row['speedup']['mean']:.2f}x with {drafts_label(row)} at batch {row['batch_size']}"
            for row in others
        )
        unsure = [row for row in others if standing(row["speedup"]) != "pays"]
        if not unsure:
            return f"; it measured {listed}"
        first = min(unsure, key=lambda row: row["batch_size"])
        reason = "no sure gain" if standing(first["speedup"]) == "unclear" else "a loss"
        return f"; it measured {listed}, {reason} there: do not speculate from batch {first['batch_size']} on"
    model = evaluation.get("cost_model")
    if not model:
        return ""
    stops, largest = model["stops_paying_at"], model["costs"][-1]["batch_size"]
    if stops is None:
        return f"; the cost model expects a gain up to batch {largest}, which was not decoded"
    return f"; by the cost model do not speculate above batch {max(1, int(stops))}"
