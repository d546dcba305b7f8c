"""On-policy batches: the drafter's own continuations of training prompts, which the target then judges.

While it drafts, a drafter goes on from its own tokens, so a share of its training on them shows it where its
own mistakes lead (DistillSpec, Zhou et al. 2023, arXiv 2310.08461; GKD, Agarwal et al. 2023, arXiv
2306.13649, whose lambda the share is). No gradient goes through the draws. Which batches are replaced is
decided by their number, and what is drawn by number and row, so a resumed run draws the same.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from evaluation.decoder.drafters import DraftModel, DraftState, ModelDrafter
from evaluation.decoder.noise import Draws
from evaluation.decoder.runner import Runner
from evaluation.decoder.sampling import SamplingOptions

if TYPE_CHECKING:
    from distill.models import Target
    from distill.train import OnPolicyConfig


@dataclass(frozen=True)
class Rollouts:
    """Replaces batches of a training by the drafter's own text."""

    drafter: DraftModel
    target: Target
    config: OnPolicyConfig
    temperature: float
    """The drafter is sampled at it: that of the loss."""
    seed: int
    batches: int
    """Of the whole training, over all processes."""

    def wants(self, number: int) -> bool:
        """Is batch `number` of the plan replaced?"""
        late = number >= self.config.start * self.batches
        return late and random.Random(f"{self.seed}/on-policy/{number}").random() < self.config.share

    def batch(self, inputs: dict[str, Tensor], number: int, part: slice = slice(None)) -> dict[str, Any]:
        """The prompts of a batch with the drafter's continuations, as long as the target's at most, in the
        form that the collator gives; without signals, which the target has to tell anew.

        `part`: which rows of batch `number` of the plan these are, where several processes share it: a row's
        text is the same whoever has it.
        """
        device = self.drafter.model.device
        starts = inputs["completion_mask"].int().argmax(-1).tolist()
        prompts = [row[:start] for row, start in zip(inputs["input_ids"], starts, strict=True)]
        longest = inputs["completion_mask"].sum(-1)
        places = itertools.islice(itertools.count(part.start or 0, part.step or 1), len(prompts))
        seeds = [random.Random(f"{self.seed}/rollout/{number}/{place}").getrandbits(62) for place in places]
        drawn = self._continue([prompt.to(device) for prompt in prompts], int(longest.max()), seeds)
        rows = []
        for prompt, ids, limit in zip(prompts, drawn.cpu(), longest.tolist(), strict=True):
            ended = torch.isin(ids[:limit], torch.tensor(self.target.eos_ids)).nonzero()
            rows.append((prompt, ids[: int(ended[0]) + 1 if len(ended) else limit]))
        return _pad(rows, self.target.pad_id)

    def _continue(self, prompts: list[Tensor], count: int, seeds: list[int]) -> Tensor:
        """`count` tokens for each prompt: int64 [B, count]; what follows an end of sequence is to be cut."""
        model, device = self.drafter.model, self.drafter.model.device
        replaced = model.__dict__.pop("forward", None)  # the trainer's, whose tensors a copy would copy too
        try:
            room = max(map(len, prompts)) + count + 1
            space = Runner(self.target.model, len(prompts), room, optimize=False)
            options = SamplingOptions(temperature=self.temperature)
            drafter = ModelDrafter(self.drafter, space, options, optimize=False)
        finally:
            if replaced is not None:
                model.__dict__["forward"] = replaced
        tokens = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)
        position = torch.tensor([len(prompt) - 1 for prompt in prompts], device=device)
        draws = Draws(torch.tensor(seeds, device=device), position, False)
        for row in range(len(prompts)):
            drafter.start(row)
        features = torch.empty(len(prompts), 0, device=device)  # of the target: this kind reads none
        state = DraftState(tokens, position, features, draws, None)
        drafter.prepare(state, count)
        return drafter.draft(state, count).ids.clone()


def _pad(rows: list[tuple[Tensor, Tensor]], pad_id: int) -> dict[str, Tensor]:
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    input_ids = torch.full((len(rows), width), pad_id, dtype=torch.int64)
    attention_mask = torch.zeros(len(rows), width, dtype=torch.int64)
    completion_mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        input_ids[row, :end] = torch.cat((prompt.cpu(), answer))
        attention_mask[row, :end] = 1
        completion_mask[row, len(prompt) : end] = True
    return {"input_ids": input_ids, "attention_mask": attention_mask, "completion_mask": completion_mask}
