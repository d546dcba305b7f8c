"""The menu of distillation losses: what each minimises, where it comes from, what it does for acceptance.

Shape legend: N completion tokens; V ids of the draft vocabulary.

Every loss is taken at one position over the draft vocabulary. The draft's distribution q there is a softmax
over those V ids. The target's p is *true*: normalised over the target's full vocabulary, so that with a
reduced draft vocabulary its V entries sum to the covered mass m <= 1. The mass outside can never be drafted
and counts as rejected. Acceptance of a sampled draft is alpha = sum min(p, q) (Leviathan et al. 2023, arXiv
2211.17192).

Arguments, everywhere: `draft_logits_NV`, already divided by the temperature, and true
`target_log_probs_NV` at that same temperature, -inf allowed; both float32 or float64. The result is the loss
per token, [N], differentiable in the draft's logits. Gradients below are in those logits, with
s = sum of q where q < p. `distill.chunked` applies a loss to hidden states without an [N, V] tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from distill.loss_config import LossName

Divergence = Callable[[Tensor, Tensor], Tensor]

_LOG_FLOOR = -1000.0
"""log p below this counts as this, where p = 0 would make a loss infinite."""
_SIGMA_FLOOR = 1e-6


def divergence(name: LossName, *, eta: float = 3.0, beta: float = 0.5) -> Divergence:
    """The loss of that name, of (draft logits, target log-probabilities); `cross_entropy`, which takes labels
    instead, is none."""
    menu: dict[str, Divergence] = {
        "forward_kl": forward_kl,
        "reverse_kl": reverse_kl,
        "jsd": partial(jsd, beta=beta),
        "tvd": tvd,
        "tvd_pp": tvd_pp,
        "neg_log_acceptance": neg_log_acceptance,
        "lk_hybrid": partial(lk_hybrid, eta=eta),
        "argmax": argmax,
    }
    return menu[name]


def forward_kl(draft_logits_NV: Tensor, target_log_probs_NV: Tensor) -> Tensor:
    """Forward KL divergence per token, [N], weighted with the covered mass.

        KL = sum_v p_v (log p_v - log q_v) - m log m = m * KL(p / m || q),    m = sum_v p_v

    At least 0, and 0 only where q is proportional to p. Gradient: `m q - p`; a position whose mass lies
    outside the draft vocabulary, where nothing can be accepted, pulls little. Relation to acceptance (m = 1):
    alpha >= 1 - sqrt(KL / 2) by Pinsker's inequality. Source: DistillSpec (Zhou et al. 2023, arXiv
    2310.08461), which found it among the best choices for most tasks; the weight m is ours.
    """
    target_probs_NV = target_log_probs_NV.exp()
    mass_N = target_probs_NV.sum(-1)
    cross_N = (target_probs_NV * torch.log_softmax(draft_logits_NV, dim=-1)).sum(-1)
    return (
        torch.special.xlogy(target_probs_NV, target_probs_NV).sum(-1)
        - torch.special.xlogy(mass_N, mass_N)
        - cross_N
    )


def reverse_kl(draft_logits_NV: Tensor, target_log_probs_NV: Tensor) -> Tensor:
    """Reverse KL divergence per token, [N]: `sum_v q_v (log q_v - log p_v)`.

    At least -log m. Gradient: `q (log q - log p - reverse KL)`. It draws the draft to the target's modes and
    lets go of its tail, which is what an argmax draft needs; acceptance is bounded as by forward KL,
    alpha >= 1 - sqrt(KL(q || p) / 2). Source: DistillSpec (arXiv 2310.08461), best for GSM8K at temperature
    1; GKD (Agarwal et al. 2023, arXiv 2306.13649) at beta 1.
    """
    log_draft_NV = torch.log_softmax(draft_logits_NV, dim=-1)
    return (log_draft_NV.exp() * (log_draft_NV - _floored(target_log_probs_NV))).sum(-1)


def jsd(draft_logits_NV: Tensor, target_log_probs_NV: Tensor, beta: float = 0.5) -> Tensor:
    """Generalised Jensen-Shannon divergence per token, [N], with the uncovered mass as one more id that the
    draft never gives.

        JSD = beta KL(p || r) + (1 - beta) KL(q || r),    r = beta p + (1 - beta) q,    0 < beta < 1

    Gradient: `(1 - beta) q (log(q / r) - E_q[log(q / r)])`. JSD / beta tends to forward KL as beta -> 0 and
    JSD / (1 - beta) to reverse KL as beta -> 1. Bounded, and at beta 1/2 at least half of TVD squared, so
    alpha >= 1 - sqrt(2 JSD). Source: GKD (arXiv 2306.13649), whose beta it is; DistillSpec (arXiv
    2310.08461), best for summaries at temperature 0.
    """
    log_draft_NV, probs_NV = torch.log_softmax(draft_logits_NV, dim=-1), target_log_probs_NV.exp()
    log_beta = probs_NV.new_tensor(beta).log()
    log_mix_NV = torch.logaddexp(target_log_probs_NV + log_beta, log_draft_NV + torch.log1p(-log_beta.exp()))
    outside_N = -(1 - probs_NV.sum(-1)) * log_beta  # r is beta p there
    of_target_N = (torch.special.xlogy(probs_NV, probs_NV) - probs_NV * log_mix_NV).sum(-1) + outside_N
    of_draft_N = (log_draft_NV.exp() * (log_draft_NV - log_mix_NV)).sum(-1)
    return beta * of_target_N + (1 - beta) * of_draft_N


def tvd(draft_logits_NV: Tensor, target_log_probs_NV: Tensor) -> Tensor:
    """Total variation distance per token, [N]: `1 - sum_v min(p_v, q_v) = 1 - alpha`, between 0 and 1.

    It *is* the rejection probability of a sampled draft, uncovered mass included. Gradient:
    `-q (1[q < p] - s)`; it vanishes for a draft that puts no mass near the target's, so it suits drafters
    that already are close. Source: DistillSpec (arXiv 2310.08461); gradient as in LK losses (Samarin et al.
    2026, arXiv 2602.23881).
    """
    target_probs_NV = target_log_probs_NV.exp()
    draft_probs_NV = torch.softmax(draft_logits_NV, dim=-1)
    # Not torch.minimum, which sends half of the gradient through ties: 1[q < p] everywhere, as in the chunked
    # form
    overlap_NV = torch.where(draft_probs_NV < target_probs_NV, draft_probs_NV, target_probs_NV)
    return 1 - overlap_NV.sum(-1)


def tvd_pp(draft_logits_NV: Tensor, target_log_probs_NV: Tensor) -> Tensor:
    """TVD++ per token, [N]: the value of `tvd`, the gradient of a policy gradient with normalised advantage.

    TVD's gradient is `-E_q[r grad log q]` with the reward `r = 1[q < p]`. Here r becomes
    `(r - mu) / sigma` with the mean mu = s and the deviation sigma = sqrt(s (1 - s)) of r under q at this
    position, so the gradient is `-q (1[q < p] - s) / sigma`: it falls with the root of the draft's mass near
    the target's where TVD's falls with that mass. Acceptance is what it raises, as TVD does. Source: Goel et
    al. 2024 (arXiv 2403.00858), which does not say over what mu and sigma are taken; over a whole batch they
    would only scale TVD's gradient by one number, so they are taken per position here.
    """
    distance_N = tvd(draft_logits_NV, target_log_probs_NV)
    draft_probs_NV = torch.softmax(draft_logits_NV.detach(), dim=-1)
    share_N = draft_probs_NV.where(draft_probs_NV < target_log_probs_NV.exp(), 0).sum(-1)
    sigma_N = (share_N * (1 - share_N)).clamp(min=0).sqrt().clamp(min=_SIGMA_FLOOR)
    return distance_N.detach() + (distance_N - distance_N.detach()) / sigma_N


def neg_log_acceptance(draft_logits_NV: Tensor, target_log_probs_NV: Tensor) -> Tensor:
    """Negative log of the acceptance of a sampled draft per token, [N]: `-log sum_v min(p_v, q_v)`.

    At least -log m. Gradient: TVD's divided by alpha, so it does not vanish far from the target; for a point
    mass p it is the cross-entropy. Source: LK losses (Samarin et al. 2026, arXiv 2602.23881), best at
    temperature 1 on MT-Bench there.
    """
    log_draft_NV, log_target_NV = torch.log_softmax(draft_logits_NV, dim=-1), _floored(target_log_probs_NV)
    return -torch.where(log_draft_NV < log_target_NV, log_draft_NV, log_target_NV).logsumexp(-1)


def lk_hybrid(draft_logits_NV: Tensor, target_log_probs_NV: Tensor, eta: float = 3.0) -> Tensor:
    """Adaptive mix of forward KL and TVD per token, [N]: `lambda KL + (1 - lambda) TVD`.

    `lambda = exp(-eta * stopgrad(mean alpha))` with the acceptance averaged over the N tokens given: KL,
    whose gradient carries from afar, while the draft is poor, and the rejection probability itself once it is
    good. Source: LK losses (Samarin et al. 2026, arXiv 2602.23881), eta = 3.
    """
    tvd_N = tvd(draft_logits_NV, target_log_probs_NV)
    weight = torch.exp(-eta * (1 - tvd_N).mean().detach())
    return weight * forward_kl(draft_logits_NV, target_log_probs_NV) + (1 - weight) * tvd_N


def argmax(draft_logits_NV: Tensor, target_log_probs_NV: Tensor) -> Tensor:
    """For servers that draft by argmax, [N]: `-log sum_v p_v q_v`, at least `-log max p`.

    `sum p q` is the acceptance of a sampled draft that must equal the target's own draw. Over all q it is
    highest for a point mass at the target's argmax, where it is `p(argmax q)`, the acceptance of an argmax
    draft, and the two argmaxes agree, which is what temperature 0 accepts: q is asked for the best id alone
    and not for the rest of p, and an id that is nearly as good costs nearly nothing, unlike with
    cross-entropy on the argmax. Gradient: `q - p q / sum p q`. For a point mass p it is the cross-entropy.
    Source: ours.
    """
    joint_NV = torch.log_softmax(draft_logits_NV, dim=-1) + _floored(target_log_probs_NV)
    return -joint_NV.logsumexp(-1)


def cross_entropy(draft_logits_NV: Tensor, labels_N: Tensor) -> Tensor:
    """Negative log-likelihood of the target's own token, [N]: `-log q_y`, the black-box control without
    target signal.

    `labels_N` (int64) are rows of the draft vocabulary, -1 where the token is outside it: such a position has
    loss 0 and no gradient but stays in N, as its acceptance is 0 whatever the draft does. In expectation over
    the target's tokens at temperature 1 its gradient is forward KL's, with the noise of one sample. Source:
    sequence-level distillation (Kim and Rush 2016, arXiv 1606.07947).
    """
    known_N = labels_N >= 0
    log_probs_NV = torch.log_softmax(draft_logits_NV, dim=-1)
    picked_N = log_probs_NV.gather(-1, labels_N.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.where(known_N, -picked_N, 0.0)


def _floored(log_probs_NV: Tensor) -> Tensor:
    return log_probs_NV.clamp(min=_LOG_FLOOR)
