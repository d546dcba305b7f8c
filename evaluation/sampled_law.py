"""Do sampled texts follow the target's law? A joint chi-square test that needs a thousand tokens.

A text is checked through the target's own probabilities. All ids are put in order, those first that the draft
favours most over the target; a token then becomes the number u in [0, 1) at which it stands in that order:
the target's mass before it, plus a random part of its own. Where every token follows the target's
distribution given the tokens before it, and only there, the numbers of a text are independent and uniform
(Rosenblatt 1952, doi 10.1214/aoms/1177729394; the random part is for discrete laws). Whatever verification
does wrong pulls tokens towards the draft or away from it, thus to one end of the order.

Pairs of neighbouring tokens fall into CELLS x CELLS joint cells, which a chi-square test compares with the
uniform law or with another set of texts. Shapes: B texts of L tokens after a prompt, N tokens, V ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from evaluation.decoder.heads import HeadModel, drafts, read_text
from evaluation.decoder.noise import invert
from evaluation.decoder.sampling import SamplingOptions, probabilities
from evaluation.head import head_of, row_blocks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from evaluation.decoder.drafters import DraftModel

CELLS = 4
POWER = 0.9


@dataclass
class Scored:
    """What texts say about their law."""

    uniforms: Tensor
    """float64 `[B, L - 1]`: the places of tokens 1 .. L - 1; token 0 comes from the prefill."""
    draft_uniforms: Tensor
    """float64 `[B, L - 1]`: the places of tokens drawn from the draft: what a leak looks like."""
    distance: float
    """Mean total variation distance between the target's and the draft's distributions on these texts."""

    def pairs(self) -> np.ndarray:
        """Counts of neighbouring pairs by joint cell, int64 `[CELLS * CELLS]`; each token is in one pair."""
        cells = self.cells(self.uniforms)
        whole = cells[:, : cells.shape[1] // 2 * 2]
        joint = whole[:, ::2] * CELLS + whole[:, 1::2]
        return torch.bincount(joint.reshape(-1), minlength=CELLS * CELLS).numpy()

    def draft_shares(self) -> np.ndarray:
        """Share of draft-drawn tokens by cell, float64 `[CELLS]`; 1 / CELLS where draft equals target."""
        counts = torch.bincount(self.cells(self.draft_uniforms).reshape(-1), minlength=CELLS).double()
        return (counts / counts.sum()).numpy()

    @staticmethod
    def cells(uniforms: Tensor) -> Tensor:
        return (uniforms * CELLS).long().clamp(0, CELLS - 1)


def merge(parts: Sequence[Scored]) -> Scored:
    """The texts of several prompts together; all of one length."""
    uniforms, drawn = ([getattr(part, name) for part in parts] for name in ("uniforms", "draft_uniforms"))
    weights = [len(part.uniforms) for part in parts]
    distance = float(np.average([part.distance for part in parts], weights=weights))
    return Scored(torch.cat(uniforms), torch.cat(drawn), distance)


@torch.inference_mode()
def score(
    target: PreTrainedModel,
    drafter: DraftModel,
    prompt: Sequence[int],
    texts: Sequence[Sequence[int]],
    options: SamplingOptions,
    *,
    argmax: bool,
    seed: int,
) -> Scored:
    """Where the tokens of `texts`, B continuations of one prompt by L tokens each, stand.

    The probabilities come from transformers' own forward and cache, not from the decoder under test.
    `argmax`: the drafter proposes its most likely token, so its distribution is one-hot.
    """
    tokens = torch.tensor(texts)
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(3, tokens[:, 1:].numel(), generator=generator, dtype=torch.float64)
    hidden = _states(target, prompt, tokens)
    if isinstance(drafter.model, HeadModel):
        draft_hidden = _first_draft_states(target, drafter.model, prompt, tokens)
    else:
        draft_hidden = _states(drafter.model, prompt, tokens)
    heads = head_of(target), head_of(drafter.model)
    vocab_size = len(heads[0])
    flat = tokens[:, 1:].reshape(-1)
    found, drawn, distances = [], [], []
    for block in row_blocks(len(flat), vocab_size):
        target_probs = probabilities(heads[0].logits(hidden[block]), options).cpu()
        own = heads[1].logits(draft_hidden[block])
        own = _one_hot(own) if argmax else probabilities(own, options)
        draft_probs = own.cpu()
        if drafter.vocab is not None:
            full = torch.zeros(len(draft_probs), vocab_size)
            draft_probs = full.index_copy_(1, drafter.vocab.cpu(), draft_probs)
        favour = draft_probs / target_probs  # inf where only the draft can; nan (0 / 0) comes last, massless
        found.append(places(target_probs, favour, flat[block], noise[0, block]))
        drawn.append(places(target_probs, favour, invert(draft_probs, noise[1, block]), noise[2, block]))
        distances.append((target_probs - draft_probs).clamp(min=0).sum(-1))
    shape = tokens[:, 1:].shape
    distance = float(torch.cat(distances).double().mean())
    return Scored(torch.cat(found).reshape(shape), torch.cat(drawn).reshape(shape), distance)


def places(target_probs: Tensor, favour: Tensor, tokens: Tensor, noise: Tensor) -> Tensor:
    """Where tokens int64 `[N]` stand in [0, 1]: the mass of `target_probs [N, V]` on ids with more `favour`
    than theirs, plus `noise [N]` (uniform) of the mass on ids with as much; float64 `[N]`.

    Ids of equal favour count as one outcome. A token of no mass stands where it would have its place.
    """
    own = favour.gather(1, tokens[:, None])
    probs = target_probs.double()
    before = torch.where(favour > own, probs, 0).sum(-1)
    level = torch.where(favour == own, probs, 0).sum(-1)
    return (before + noise * level) / probs.sum(-1)


def _states(model: PreTrainedModel, prompt: Sequence[int], tokens: Tensor) -> Tensor:
    """The hidden states `[B * (L - 1), H]` that predict tokens 1 .. L - 1 of each text; the prompt is read
    once.
    """
    backbone, device = model.get_decoder(), model.device
    cache = DynamicCache(config=model.config)
    backbone(input_ids=torch.tensor([list(prompt)], device=device), cache=cache, use_cache=True)
    cache.batch_repeat_interleave(len(tokens))
    inputs = tokens[:, :-1].to(device)
    hidden = backbone(input_ids=inputs, cache=cache, use_cache=True).last_hidden_state
    return hidden.reshape(-1, hidden.shape[-1])


def _first_draft_states(
    target: PreTrainedModel, model: HeadModel, prompt: Sequence[int], tokens: Tensor
) -> Tensor:
    """The same of a head on the target, were every token the first one of a draft."""
    before = torch.tensor([list(prompt)]).expand(len(tokens), -1)
    text = torch.cat((before, tokens), dim=1).to(target.device)
    mask = torch.zeros_like(text, dtype=torch.bool)
    mask[:, len(prompt) + 1 :] = True
    return next(drafts(model, read_text(target, model, text)[0], mask)).states


def _one_hot(logits: Tensor) -> Tensor:
    return torch.zeros_like(logits).scatter_(1, logits.argmax(-1, keepdim=True), 1)


def law_p_value(counts: np.ndarray) -> float:
    """Chance of counts at least this far from equal shares, where the law is uniform (Pearson's
    chi-square).
    """
    from scipy.stats import chisquare

    return float(chisquare(counts).pvalue)


def same_law_p_value(first: np.ndarray, second: np.ndarray) -> float:
    """Chance of two sets of counts at least this different, where their law is one (chi-square of
    homogeneity).
    """
    from scipy.stats import chi2_contingency

    table = np.stack((first, second))
    return float(chi2_contingency(table[:, table.sum(0) > 0], correction=False).pvalue)


def smallest_leak(draft_shares: np.ndarray, pairs: int, alpha: float) -> float:
    """The smallest share of tokens drawn from the draft in place of the target that `law_p_value` at level
    `alpha` finds with probability POWER, given so many pairs; 1 where even all would not be found.

    With share e each token's cell law is 1/C + e (s - 1/C), s the `draft_shares`, so a pair's noncentrality
    is (1 + e^2 f)^2 - 1 with f = sum over cells of C (s - 1/C)^2.
    """
    from scipy.optimize import brentq
    from scipy.stats import chi2, ncx2

    freedom = CELLS * CELLS - 1
    threshold = chi2.isf(alpha, freedom)
    contrast = float((CELLS * (draft_shares - 1 / CELLS) ** 2).sum())

    def missing(leak: float) -> float:
        noncentrality = pairs * ((1 + leak**2 * contrast) ** 2 - 1)
        return float(ncx2.sf(threshold, freedom, noncentrality)) - POWER if noncentrality > 0 else -POWER

    return 1.0 if missing(1.0) < 0 else float(brentq(missing, 0.0, 1.0))
