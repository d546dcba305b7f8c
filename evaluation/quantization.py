"""What quantising the target changes for a drafter: its acceptance by the quantised target that it was made
for, and by the full one, on the same text.

Shapes: S samples, P prompts.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from evaluation.acceptance import MEASURES, AcceptanceTable, bootstrap_ratio, prompt_numbers, teacher_forced
from evaluation.decoder.drafters import DraftModel
from evaluation.head import head_of
from evaluation.signals import target_signals

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from data.records import Samples

_BATCH = 16


def acceptance_gap(
    drafter: DraftModel,
    quantised: PreTrainedModel,
    full: PreTrainedModel,
    samples: Samples,
    *,
    temperature: float,
    seed: int,
) -> dict[str, Any]:
    """The three acceptances of `drafter` by each target, teacher-forced on `samples`, and the targets' own
    agreement.

    Per measure: `quantised` and `full` (means over tokens) and `gap`, quantised minus full, paired, with a
    95 % bootstrap interval over prompts, whose samples stay together. `targets` is what the quantised target
    would accept of the full one as its drafter: `sampled` is 1 minus their mean total variation distance.
    `tokens` and `samples` say on how much.
    """

    def table(of: DraftModel, by: PreTrainedModel) -> AcceptanceTable:
        # Asked live, of both alike: what sampling kept may be of another precision
        live = partial(target_signals, by, temperature=temperature)
        settings = {"temperature": temperature, "batch_size": _BATCH, "signals": live, "target": by}
        return teacher_forced(of, head_of(by).detached(), samples, **settings)

    tables = {"quantised": table(drafter, quantised), "full": table(drafter, full)}
    full_table = tables["full"]
    owner_S = torch.from_numpy(prompt_numbers(samples, range(len(samples))))
    tokens_P = torch.bincount(owner_S[full_table.sample]).double()
    kept_P = tokens_P > 0
    found: dict[str, Any] = {"tokens": int(tokens_P.sum()), "samples": len(full_table.sample.unique())}
    for name in MEASURES:
        sums_P = {
            which: torch.bincount(owner_S[one.sample], weights=getattr(one, name).double())
            for which, one in tables.items()
        }
        difference_P = (sums_P["quantised"] - sums_P["full"])[kept_P].numpy()
        found[name] = {which: one.means()[name] for which, one in tables.items()}
        found[name]["gap"] = bootstrap_ratio(difference_P, tokens_P[kept_P].numpy(), seed=seed)
    found["targets"] = table(DraftModel(full, None), quantised).means()
    return found
