"""What the target says at the tokens of a batch: rows of probabilities that no one stores.

Shape legend as in `distill.losses`: N completion tokens; V ids of the draft vocabulary; H, T width of hidden
states; K ids kept of each token; n rows of one block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from evaluation.head import Head, as_head


@dataclass(frozen=True)
class TargetRows:
    """What the target says at N positions, restricted to the draft vocabulary without storing [N, V].

    True log-probabilities are the head's logits / temperature - `logsumexp_N`, where `logsumexp_N` is the
    log-normaliser over the target's full vocabulary at that same temperature. None where the head *is* the
    full vocabulary: it is then found on the way.
    """

    hidden_NT: Tensor
    head_VT: Head | Tensor
    logsumexp_N: Tensor | None

    def log_probs(self, block: slice, log_draft_nV: Tensor, temperature: float) -> Tensor:
        """True log-probabilities [n, V] of a block of positions."""
        logits_nV = as_head(self.head_VT).logits(self.hidden_NT[block], log_draft_nV.dtype)
        if temperature != 1:
            logits_nV.div_(temperature)
        if self.logsumexp_N is None:
            return torch.log_softmax(logits_nV, dim=-1)
        return logits_nV.sub_(self.logsumexp_N[block].to(logits_nV.dtype).unsqueeze(-1))

    def take(self, chosen: Tensor) -> TargetRows:
        """Those at some of the positions (int64 [n])."""
        normaliser = None if self.logsumexp_N is None else self.logsumexp_N[chosen]
        return TargetRows(self.hidden_NT[chosen], self.head_VT, normaliser)


@dataclass(frozen=True)
class TopKRows:
    """What the target says at N positions: K ids with their true log-probabilities, and the mass t of all
    others.

    The others are spread as the draft spreads its own mass u there: p_v = t q_v / u. For every loss whose
    terms are of the form q f(p / q) (forward and reverse KL, JSD, TVD and what is made of acceptance) that
    is the loss with all others taken as one id, in value and gradient. By the data processing inequality it
    is not more than the true loss, and less by no more than

        TVD:          min(t, u)
        forward KL:   t log(p_K u / (t q_min))

    with p_K the least probability kept, which no other id exceeds, and q_min the draft's least among the
    others. Both hold over a full vocabulary. With a reduced one the ids outside it stand in `ids_NK` as -1,
    and all others are taken to lie inside: the bound of TVD holds there too.
    """

    ids_NK: Tensor
    """int64: rows of the draft's head, -1 outside."""
    log_probs_NK: Tensor
    tail_N: Tensor

    def log_probs(self, block: slice, log_draft_nV: Tensor, temperature: float) -> Tensor:
        """Log-probabilities [n, V] of a block of positions; they are at the temperature already."""
        size = log_draft_nV.shape[1]
        ids_nK, tail_n1 = self.ids_NK[block], self.tail_N[block, None].to(log_draft_nV.dtype)
        places_nK = torch.where(ids_nK < 0, size, ids_nK)  # those outside share a column that is cut off
        wide_nW = torch.nn.functional.pad(log_draft_nV, (0, 1), value=-torch.inf)
        rest_n1 = wide_nW.scatter(1, places_nK, -torch.inf).logsumexp(-1, keepdim=True)
        wide_nW += tail_n1.log() - rest_n1.clamp(min=torch.finfo(rest_n1.dtype).min / 4)
        wide_nW.scatter_(1, places_nK, self.log_probs_NK[block].to(wide_nW.dtype))
        return wide_nW[:, :size]

    def take(self, chosen: Tensor) -> TopKRows:
        """Those at some of the positions (int64 [n])."""
        return TopKRows(self.ids_NK[chosen], self.log_probs_NK[chosen], self.tail_N[chosen])


def target_rows(
    told: Mapping[str, Tensor], head_VT: Head | Tensor, rows: Tensor | None
) -> TargetRows | TopKRows:
    """What a batch's signals say, by their names in `data.signals`; `logsumexp` may be missing over the full
    vocabulary.

    `head_VT`: the target's, restricted to the draft vocabulary; `rows` maps target ids to rows of the draft
    head, None where they are the same.
    """
    if "ids" in told:
        ids = told["ids"].long()
        return TopKRows(ids if rows is None else rows[ids], told["log_probs"], told["tail"])
    logsumexp = told.get("logsumexp")
    assert logsumexp is not None or rows is None
    head = as_head(head_VT)
    return TargetRows(told["hidden"].to(head.weight_VH.dtype), head, logsumexp)


def row_of_id(vocab: Tensor | None, full_size: int, device: torch.device) -> Tensor | None:
    """int64 [V]: each target id's row of a reduced head, -1 where it has none."""
    if vocab is None:
        return None
    rows = torch.full((full_size,), -1, dtype=torch.int64, device=device)
    rows[vocab.to(device)] = torch.arange(len(vocab), device=device)
    return rows
