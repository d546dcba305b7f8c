"""The names under which an evaluation's numbers and facts stand in MLflow, made from evaluation.json in one
place.

`distill.tracking` writes them and `evaluation.registry` reads them; both go through here, so they cannot
drift apart.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_ROW = r"((un)?seen/\w+/k\d+/(b\d+/)?)?"
_NAME = re.compile(
    r"(before/)?acceptance/((un)?seen/t[\d.e-]+/[\w-]+/)?(sampled|argmax|greedy)|"
    r"(before/)?acceptance/(sampled|argmax|greedy)_temperature|"
    rf"speed/{_ROW}(speedup(_low|_high)?|predicted_speedup|(plain_)?tokens_per_second|t[tp][fo]t_ms_p(50|95))|"
    r"draft/bytes|speed/((first_)?cost_ratio|(verify_overhead/k|predicted_best_k/b|predicted_best_speedup/b)\d+)|"
    rf"decode/{_ROW}(tokens_per_target_call|acceptance_rate|bugs|prompts|(un)?conditional_acceptance/pos_\d+)|"
    r"decode/(num_speculative_tokens|stops_early)|"
    r"lossless/(holds|law_p_value|plain_p_value|smallest_leak|self_draft_acceptance)|"
    r"quantization/(sampled|argmax|greedy)_(by_full|gap)"
)


HEADLINE = (
    *("speed/speedup", "speed/speedup_low", "speed/speedup_high", "speed/cost_ratio"),
    *("speed/tokens_per_second", "speed/plain_tokens_per_second"),
    *("decode/tokens_per_target_call", "decode/num_speculative_tokens"),
    *("acceptance/greedy", "acceptance/sampled", "acceptance/argmax", "lossless/holds"),
)
"""What a run of a recipe is compared by in MLflow's own pages, beside its settings."""


def is_measure(name: str) -> bool:
    """Might an evaluation hold a measure of this name? Known before anything is measured."""
    return _NAME.fullmatch(name) is not None


def machine_label(machine: Mapping[str, Any]) -> str:
    """The hardware of a measurement in words; software (torch, commit) is logged but does not split a
    group.
    """
    parts = [str(machine.get("cpu", "unknown processor")), f"{machine.get('cores', '?')} cores"]
    if machine.get("threads", "all") != "all":
        parts.append(f"{machine['threads']} threads")
    if machine.get("gpu"):
        parts.insert(0, str(machine["gpu"]))
    return ", ".join(parts)


def serving_label(serving: Mapping[str, Any]) -> str:
    """The serving mode in words, e.g. `temperature 0, batch 1` or `temperature 0.8, top-p 0.95, sampled
    draft`.
    """
    temperature = float(serving.get("temperature", 0.0))
    parts = [f"temperature {temperature:g}"]
    if temperature > 0:
        parts.append(f"top-p {float(serving.get('top_p', 1.0)):g}")
        parts.append(f"{serving.get('draft_sampling', 'sampled')} draft")
    return ", ".join([*parts, f"batch {serving.get('batch_size', 1)}"])


def split_label(evaluation: Mapping[str, Any], split: str) -> str:
    """The test prompts of a split in words: those of seen or unseen templates. Prompts that came without
    templates are new ones of known sources, and never of an unseen template.
    """
    if split == "seen" and not evaluation.get("templates", True):
        return "new prompts of known sources"
    return f"{split} templates"


def drafts_label(best: Mapping[str, Any]) -> str:
    """How many drafts a round the headline path makes: `K = 4`, or `up to 6 drafts a round` where it stops
    early.
    """
    count = best.get("num_speculative_tokens")
    return f"up to {count} drafts a round" if best.get("drafter") == "adaptive" else f"K = {count}"


def best_decode(evaluation: Mapping[str, Any]) -> Mapping[str, Any]:
    """The decode row that `best` names, by drafter, K and split ({} where there is none)."""
    best = evaluation.get("best") or {}
    for row in evaluation.get("decode", []):
        if (
            row.get("drafter") == best.get("drafter", "model")
            and row.get("num_speculative_tokens") == best.get("num_speculative_tokens")
            and row.get("split") == best.get("split")
        ):
            return row
    return {}


def headline_split(evaluation: Mapping[str, Any]) -> str:
    """The split that the headline was measured on: seen templates, or unseen ones where none was seen."""
    return str((evaluation.get("best") or {}).get("split") or "seen")


def headline_acceptance(
    rows: Iterable[Mapping[str, Any]], measure: str, serving: Mapping[str, Any], split: str
) -> Mapping[str, Any]:
    """The acceptance row that stands for `measure` in one number: {"mean", "low", "high", "temperature"} or
    {}.

    `greedy` is read from samples drawn at temperature 0; `sampled` and `argmax` from samples at the serving
    temperature, which is 1 where the drafter is served at 0 (as in training). Where no samples were drawn
    at that temperature the nearest one that was measured stands in, and is named.
    """
    served = float(serving.get("temperature", 0.0))
    wanted = 0.0 if measure == "greedy" else served if served > 0 else 1.0
    matching = [
        row for row in rows if row.get("split") == split and row.get("task") == "all" and row.get(measure)
    ]
    if not matching:
        return {}
    row = min(matching, key=lambda row: abs(float(row["temperature"]) - wanted))
    return {**row[measure], "temperature": float(row["temperature"])}


def as_served(
    rows: Sequence[Mapping[str, Any]], serving: Mapping[str, Any]
) -> tuple[str, float, list[Mapping[str, Any]]]:
    """The acceptance that the serving mode has ("greedy" at temperature 0), and of `rows` (at least one)
    those of the nearest temperature that was sampled, which is named.
    """
    served = float(serving.get("temperature", 0.0))
    measure = "greedy" if served == 0 else str(serving.get("draft_sampling", "sampled"))
    nearest = min((float(row["temperature"]) for row in rows), key=lambda value: abs(value - served))
    return measure, nearest, [row for row in rows if row["temperature"] == nearest]


def candidate_metrics(evaluation: Mapping[str, Any]) -> dict[str, float]:
    """Flatten evaluation.json into metric names: acceptance/, decode/, speed/ and others (finite only).

    The unprefixed names are the headline (the best K on the split that `best` names); every single row
    stands under its own name too, e.g. `acceptance/unseen/t1/json/sampled` or
    `speed/seen/ngram/k4/speedup`.
    """
    found: dict[str, Any] = {}
    serving = evaluation.get("serving") or {}
    best = best_decode(evaluation)
    split = headline_split(evaluation)
    for prefix, rows in (("", "acceptance"), ("before/", "acceptance_before")):
        for measure in ("sampled", "argmax", "greedy"):
            headline = headline_acceptance(evaluation.get(rows) or [], measure, serving, split)
            found[f"{prefix}acceptance/{measure}"] = headline.get("mean")
            found[f"{prefix}acceptance/{measure}_temperature"] = headline.get("temperature")
        for row in evaluation.get(rows) or []:
            name = f"{prefix}acceptance/{row['split']}/t{float(row['temperature']):g}/{row['task']}"
            for measure in ("sampled", "argmax", "greedy"):
                found[f"{name}/{measure}"] = (row.get(measure) or {}).get("mean")
    for row in evaluation.get("decode") or []:
        suffix = f"{row['split']}/{row['drafter']}/k{row['num_speculative_tokens']}"
        found |= {f"speed/{suffix}/{key}": value for key, value in _speed(row).items()}
        found |= {f"decode/{suffix}/{key}": value for key, value in _decode(row).items()}
    found |= {f"speed/{key}": value for key, value in _speed(best).items()}
    found |= {f"decode/{key}": value for key, value in _decode(best).items()}
    found["decode/num_speculative_tokens"] = best.get("num_speculative_tokens")
    found["decode/stops_early"] = float(best.get("drafter") == "adaptive") if best else None
    found |= _lossless(evaluation.get("certificate") or {})
    for measure in ("sampled", "argmax", "greedy"):
        gap = (evaluation.get("quantization") or {}).get(measure) or {}
        found |= {f"quantization/{measure}_by_full": gap.get("full")} if gap else {}
        found |= {f"quantization/{measure}_gap": gap["gap"]["mean"]} if gap else {}
    cost = evaluation.get("cost") or {}
    found["speed/cost_ratio"] = cost.get("cost_ratio")
    if cost.get("first_draft_step_ms") and cost.get("target_step_ms"):
        found["speed/first_cost_ratio"] = cost["first_draft_step_ms"] / cost["target_step_ms"]
    found["draft/bytes"] = evaluation.get("drafter_bytes")
    for width, overhead in (cost.get("verify_overhead") or {}).items():
        found[f"speed/verify_overhead/k{width}"] = overhead
    for row in evaluation.get("batches") or []:
        suffix = f"{row['split']}/{row['drafter']}/k{row['num_speculative_tokens']}/b{row['batch_size']}"
        found |= {f"speed/{suffix}/{key}": value for key, value in _speed(row).items()}
    for row in (evaluation.get("cost_model") or {}).get("best") or []:
        found[f"speed/predicted_best_k/b{row['batch_size']}"] = row["num_speculative_tokens"]
        found[f"speed/predicted_best_speedup/b{row['batch_size']}"] = row["speedup"]
    numbers = {key: float(value) for key, value in found.items() if isinstance(value, (int, float))}
    return {key: value for key, value in numbers.items() if math.isfinite(value)}


def _lossless(certificate: Mapping[str, Any]) -> dict[str, Any]:
    """`lossless/holds` is 1 or 0; it is missing where there is no certificate."""
    if not certificate:
        return {}
    law = certificate["sampled"]
    return {
        "lossless/holds": float(certificate["holds"]),
        "lossless/law_p_value": law["law_p_value"],
        "lossless/plain_p_value": law["plain_p_value"],
        "lossless/smallest_leak": law["smallest_leak"],
        "lossless/self_draft_acceptance": min(
            certificate["self_draft"][name] for name in ("greedy", "sampled")
        ),
    }


def _speed(row: Mapping[str, Any]) -> dict[str, Any]:
    speedup = row.get("speedup") or {}
    return {
        "speedup": speedup.get("mean"),
        "speedup_low": speedup.get("low"),
        "speedup_high": speedup.get("high"),
        "predicted_speedup": row.get("predicted_speedup"),
        "tokens_per_second": row.get("tokens_per_second"),
        "plain_tokens_per_second": row.get("plain_tokens_per_second"),
        **{name: row.get(name) for name in ("ttft_ms_p50", "ttft_ms_p95", "tpot_ms_p50", "tpot_ms_p95")},
    }


def _decode(row: Mapping[str, Any]) -> dict[str, Any]:
    found = {
        "tokens_per_target_call": (row.get("tokens_per_target_call") or {}).get("mean"),
        "acceptance_rate": row.get("acceptance_rate"),
        "bugs": row.get("bugs"),
        "prompts": row.get("prompts"),
    }
    for kind in ("conditional_acceptance", "unconditional_acceptance"):
        for position, value in enumerate(row.get(kind) or [], start=1):
            found[f"{kind}/pos_{position}"] = value
    return found


def candidate_params(
    recipe: Mapping[str, Any], evaluation: Mapping[str, Any], recipe_name: str
) -> dict[str, str]:
    """The facts of a candidate that `compare` prints and by which measurements are grouped."""
    target, train, draft = (recipe.get(part) or {} for part in ("target", "train", "draft"))
    model, quantization = str(target.get("model", "")), target.get("quantization", "none")
    init = draft.get("init") or {}
    return {
        "target": model if quantization == "none" else f"{model} ({quantization})",
        "recipe": recipe_name,
        "kind": str(draft.get("kind", "model")),
        "loss": str((train.get("loss") or {}).get("name", "")),
        "layers": _depth(draft),
        "init": str(init.get("from", init.get("from_", ""))),
        "vocab_size": str(draft.get("vocab_size") or "full"),
        "tokens": str(train.get("tokens", "")),
        "serving": serving_label(evaluation.get("serving") or {}),
        "machine": machine_label(evaluation.get("machine") or {}),
        "torch": str((evaluation.get("machine") or {}).get("torch", "")),
        "commit": str((evaluation.get("machine") or {}).get("commit", "")),
        "data_digest": str(evaluation.get("data_digest", "")),
    }


def _depth(draft: Mapping[str, Any]) -> str:
    """What a drafter is made of, from its part of the recipe: the layers kept, Medusa's heads, EAGLE's one
    layer.
    """
    if draft.get("kind") == "medusa":
        return f"{draft.get('heads')} heads"
    if draft.get("kind") == "eagle":
        return "1 on features"
    init = draft.get("init") or {}
    if init.get("layers"):
        kept = ",".join(str(layer) for layer in init["layers"])
    else:
        kept = f"{init['layer_count']} by {init['choose_by']}" if init.get("layer_count") else "all"
    return f"{kept}, width {init['width']}" if init.get("width") else kept
