"""A gate for continuous integration: `--require speedup>=1.5 --require lossless` on `distill evaluate`."""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from data.errors import UserError

SHORT_NAMES = {
    "speedup": "speed/speedup",
    "speedup_low": "speed/speedup_low",
    "tokens_per_target_call": "decode/tokens_per_target_call",
    "acceptance_rate": "decode/acceptance_rate",
    "greedy": "acceptance/greedy",
    "sampled": "acceptance/sampled",
    "argmax": "acceptance/argmax",
}
"""Beside these, every measure that MLflow is given may be named in full."""
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?"
_REQUIREMENT = re.compile(rf"\s*([A-Za-z][\w./-]*)\s*(>=|<=|>|<)\s*({_NUMBER})\s*")
_COMPARE = {
    ">=": lambda value, bound: value >= bound,
    "<=": lambda value, bound: value <= bound,
    ">": lambda value, bound: value > bound,
    "<": lambda value, bound: value < bound,
}


@dataclass(frozen=True)
class Requirement:
    """`measure operator bound`, such as speed/speedup >= 1.5."""

    text: str
    measure: str
    operator: str
    bound: float


def parse(text: str) -> Requirement:
    """Read `lossless` or `MEASURE>=NUMBER` (also <=, > and <). `UserError` where it is neither, or where no
    measure has such a name.
    """
    from evaluation.measures import is_measure

    if text.strip() == "lossless":
        return Requirement("lossless", "lossless/holds", ">=", 1.0)
    found = _REQUIREMENT.fullmatch(text)
    if not found:
        raise UserError(f"--require {text}: write `lossless`, or a measure and a bound as in speedup>=1.5.")
    name, operator, bound = found.groups()
    measure = SHORT_NAMES.get(name, name)
    if not is_measure(measure):
        near = difflib.get_close_matches(name, [*SHORT_NAMES, *SHORT_NAMES.values()], n=3)
        hint = f"; near it: {', '.join(near)}" if near else f"; such as {', '.join(SHORT_NAMES)}"
        raise UserError(f"--require {text.strip()}: no measure is called {name}{hint}.")
    return Requirement(text.strip(), measure, operator, float(bound))


def unmet(requirements: Sequence[Requirement], evaluation: Mapping[str, Any]) -> list[str]:
    """Why the evaluation does not pass, a sentence per requirement; empty where it passes. A measure that was
    not taken is not met.
    """
    from evaluation.measures import candidate_metrics

    measured = candidate_metrics(evaluation)
    found = []
    for wanted in requirements:
        value = measured.get(wanted.measure)
        if wanted.measure == "lossless/holds":
            if not value:
                reasons = (evaluation.get("certificate") or {}).get("reasons") or ["there is no certificate."]
                found.append(f"lossless is required: {' '.join(reasons)}")
        elif value is None:
            near = difflib.get_close_matches(wanted.measure, measured, n=3)
            hint = f"; near it: {', '.join(near)}" if near else ""
            found.append(f"{wanted.text} is required: this recipe does not measure it{hint}.")
        elif not _COMPARE[wanted.operator](value, wanted.bound):
            low, high = (measured.get(f"{wanted.measure}_{end}") for end in ("low", "high"))
            interval = "" if low is None or high is None else f" [{low:.2f}, {high:.2f}]"
            found.append(f"{wanted.text} is required: it measured {value:.3g}{interval}.")
    return found
