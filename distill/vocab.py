"""The reduced draft vocabulary: which target ids the draft head covers.

A head over the few thousand ids that the target really emits costs a fraction of the full one, in training
and in every draft step, for a small loss of acceptance (FR-Spec, arXiv 2502.14856; VocabTrim, arXiv
2506.22694: count on text that the target generated).
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from data.errors import UserError


def choose_draft_vocab(token_counts: Tensor, size: int, always_ids: Iterable[int]) -> Tensor:
    """The `size` ids that the draft head shall cover: int64 [size], ascending.

    All `always_ids` (end-of-sequence and other special ids) are in; the other places go to the most frequent
    ids, lower ids first where counts tie, so that the same counts always give the same vocabulary.

    Args: `token_counts` int64 [V], how often each id occurs in the target's samples. Raises `UserError` when
    `size` is larger than V or smaller than the number of always-included ids.
    """
    (full_size,) = token_counts.shape
    always = torch.tensor(sorted(set(always_ids)), dtype=torch.int64)
    assert len(always) == 0 or (always[0] >= 0 and always[-1] < full_size)
    if size > full_size:
        raise UserError(
            f"draft.vocab_size is {size} but the target has only {full_size} ids; "
            "lower it, or leave it out for all ids."
        )
    if size < max(1, len(always)):
        raise UserError(
            f"draft.vocab_size is {size} but the target's {len(always)} special ids are always covered; "
            "raise it."
        )
    counts = token_counts.to(device="cpu", dtype=torch.int64, copy=True)
    counts[always] = torch.iinfo(torch.int64).max
    ranked = torch.sort(counts, descending=True, stable=True).indices
    return ranked[:size].sort().values
