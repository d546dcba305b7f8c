"""What to train on: the tokens where a drafter can still learn most, and the samples whose target is flat.

- Tokens (AdaSPEC, Hu et al. 2025, arXiv 2510.19779): a reference drafter of the same start is distilled
  first. At each step only the share of tokens with the largest KL(p || q) - KL(p || q_reference) is trained:
  what the reference could not learn either is left alone, for a small drafter has no room for it.
- Samples (arXiv 2601.18902): those with the highest mean entropy of the target's distribution; along sharp
  texts there is little to learn.

Shape legend: N completion tokens of a batch; H, T widths of the draft's and the target's hidden states.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate import PartialState
from accelerate.utils import gather, pad_across_processes
from safetensors.torch import load_file, save_file
from torch import Tensor

from data.files import commit_file
from data.records import Samples, collate
from data.signals import Signals
from distill.heads import TargetRows, TopKRows, row_of_id, target_rows
from distill.loss_config import LossConfig
from distill.losses import forward_kl
from distill.models import load_drafter
from evaluation.head import Head, as_head, head_of, row_blocks
from evaluation.signals import completion_states, target_signals

if TYPE_CHECKING:
    from data.signals import TopK
    from distill.models import Target
    from distill.train import Report, TrainConfig
    from evaluation.decoder.drafters import DraftModel


def chosen_count(tokens: int, share: float) -> int:
    """How many of a batch's completion tokens are trained on."""
    return max(1, round(share * tokens))


def most_learnable(gap_N: Tensor, share: float) -> Tensor:
    """Which of this process's N tokens (int64, rising) are among the `share` of all processes' tokens with
    the largest gaps: how far their forward KL exceeds that of the reference.

    All processes have to ask, also one without a token.
    """
    state = PartialState()
    tokens = int(gather(torch.tensor([len(gap_N)], device=gap_N.device)).sum())
    gaps = gather(pad_across_processes(gap_N, pad_index=-torch.inf))
    width = len(gaps) // state.num_processes
    places = torch.topk(gaps, chosen_count(tokens, share)).indices.sort().values - state.process_index * width
    return places[(places >= 0) & (places < len(gap_N))]


@torch.no_grad()
def token_kl(
    hidden_NH: Tensor, head_VH: Head | Tensor, target: TargetRows | TopKRows, temperature: float
) -> Tensor:
    """Forward KL of each token, float32 [N], a block of rows at a time."""
    head = as_head(head_VH)
    result = torch.empty(len(hidden_NH), device=hidden_NH.device)
    for block in row_blocks(len(hidden_NH), len(head)):
        draft = (head.logits(hidden_NH[block]) / temperature).log_softmax(-1)
        result[block] = forward_kl(draft, target.log_probs(block, draft, temperature))
    return result


def reference_kl(
    drafter: DraftModel,
    target: Target,
    samples: Samples,
    config: TrainConfig,
    *,
    temperature: float,
    seed: int,
    out_dir: Path,
    report: Report,
) -> list[Tensor]:
    """For each training sample the forward KL, float32 [its completion tokens], of a reference drafter: a
    copy of `drafter` that is distilled first, with forward KL on all tokens, as long as `drafter` will be.

    Kept in `out_dir`, so that a run that goes on does not train it again.
    """
    from distill.train import train_drafter

    file = out_dir / "reference.safetensors"
    train = samples.where(split="train")
    if not file.is_file():
        folder = out_dir / "reference"
        plain = config.model_copy(
            update={"loss": LossConfig(), "learnable_share": None, "flat_share": None, "on_policy": None}
        )

        def of_reference(step: int, steps: int, tokens: int, measures: dict[str, float]) -> None:
            report(step, steps, 0, {f"reference_{name}": value for name, value in measures.items()})

        trained = train_drafter(
            type(drafter)(copy.deepcopy(drafter.model), drafter.vocab),
            target,
            samples,
            plain,
            temperature=temperature,
            seed=seed,
            out_dir=folder,
            report=of_reference,
        )
        reference = load_drafter(trained.directory, target.model.device)
        parts = _sample_kl(reference, target, train, config.batch_size, temperature)
        processes = PartialState()
        processes.wait_for_everyone()  # all have read it
        if processes.is_main_process:
            save_file({"kl": torch.cat(parts)}, file.with_suffix(".tmp"))
            commit_file(file.with_suffix(".tmp"), file)
            shutil.rmtree(folder)
        processes.wait_for_everyone()
    return list(load_file(file)["kl"].split([record.completion_tokens for record in train]))


def forget_reference(out_dir: Path) -> None:
    """Delete what `reference_kl` keeps for going on."""
    (out_dir / "reference.safetensors").unlink(missing_ok=True)


def keep_flattest(
    samples: Samples, target: Target, share: float, *, batch_size: int, temperature: float
) -> Samples:
    """The samples with a share of the train split alone: those with the highest mean entropy of the target's
    distribution over their completion tokens."""
    train = [index for index, record in enumerate(samples) if record.split == "train"]
    entropy = torch.empty(len(train))
    # The entropy of the most likely ids alone would be another one
    source = samples if samples.has_signals else Samples(samples.records, None)
    for chosen, told, owner in _batches(source.pick(train), target, batch_size, temperature):
        assert isinstance(told, Signals)
        own = torch.zeros(len(chosen)).index_add_(0, owner, _entropy(target, told, temperature).cpu())
        entropy[chosen] = own / torch.bincount(owner, minlength=len(chosen))
    flat = {train[place] for place in torch.topk(entropy, max(1, round(share * len(train)))).indices.tolist()}
    kept = [i for i, record in enumerate(samples) if record.split != "train" or i in flat]
    return samples.pick(kept)


@torch.no_grad()
def _entropy(target: Target, told: Signals, temperature: float) -> Tensor:
    """Entropy in nats of the target's distribution at each of N positions, float32 [N]."""
    head = head_of(target.model)
    weight = head.weight_VH
    result = torch.empty(len(told), device=weight.device)
    for block in row_blocks(len(told), len(head)):
        logits = head.logits(told.hidden[block].to(weight.device, weight.dtype)) / temperature
        result[block] = torch.special.entr(logits.softmax(-1)).sum(-1)
    return result


def _sample_kl(
    drafter: DraftModel, target: Target, samples: Samples, batch_size: int, temperature: float
) -> list[Tensor]:
    whole, draft_head = head_of(target.model), head_of(drafter.model)
    device = target.model.device
    rows = row_of_id(drafter.vocab, len(whole), device)
    head = whole.rows(drafter.vocab)
    result: list[Tensor] = [torch.empty(0)] * len(samples)
    for chosen, told, owner in _batches(samples, target, batch_size, temperature):
        batch = collate(samples, chosen, target.pad_id)
        with torch.no_grad():
            states = completion_states(
                drafter.model, batch.input_ids.to(device), batch.completion_mask.to(device)
            )
        own = {name: value.to(device) for name, value in told.tensors().items()}
        kl = token_kl(
            states.to(draft_head.weight_VH.dtype), draft_head, target_rows(own, head, rows), temperature
        ).cpu()
        for place, index in enumerate(chosen):
            result[index] = kl[owner == place]
    return result


def _batches(
    samples: Samples, target: Target, batch_size: int, temperature: float
) -> Iterator[tuple[list[int], Signals | TopK, Tensor]]:
    """Batches of samples of like length: indices, signals of their N tokens, and each token's place in the
    batch, int64 [N]."""
    order = sorted(range(len(samples)), key=lambda index: len(samples[index].input_ids))
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        batch = collate(samples, chosen, target.pad_id)
        told = batch.signals or target_signals(target.model, batch, temperature)
        yield chosen, told, torch.arange(len(chosen)).repeat_interleave(batch.completion_mask[:, 1:].sum(-1))
