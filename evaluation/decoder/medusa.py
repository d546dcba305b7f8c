"""Medusa: heads on the target's last hidden state, one per drafted token, all of them computed in one go.

Head k of state h gives softmax(W_k (h + SiLU(R_k h))), with R_k starting at zero and W_k at the target's head
(Cai et al. 2024, arXiv 2401.10774). A head sees no drafted token, not even the one that the target has just
emitted: that makes it cheap, and the later heads weak. Its "typical acceptance" changes the output's law and
is not offered: drafts are judged by the rules that all kinds share.

Shapes: B rows, n heads, H hidden size, Vd rows of a head.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from evaluation.decoder.drafters import Draft, DraftState, ModelDrafter
from evaluation.decoder.heads import HeadModel, Text, shifted
from evaluation.decoder.linear import pack_linears, quantize_linears
from evaluation.decoder.runner import Branches, share_parameters


class MedusaConfig(PreTrainedConfig):
    """The fields of Medusa's public checkpoints."""

    model_type = "medusa"

    hidden_size: int = 0
    vocab_size: int = 0
    truncated_vocab_size: int = 0
    """Rows of a head: those of a reduced draft vocabulary, else as many as `vocab_size`."""
    num_heads: int = 0
    num_hidden_layers: int = 1
    """Residual blocks per head."""
    shared_head: bool = False
    """One head for all drafted tokens, so that only the residual blocks tell them apart."""


AutoConfig.register("medusa", MedusaConfig, exist_ok=True)


class ResidualBlock(nn.Module):
    """h + SiLU(R h), as many times as there are layers."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width, bias=False) for _ in range(depth)])

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = hidden + nn.functional.silu(layer(hidden))
        return hidden


class MedusaModel(HeadModel):
    """The residual blocks and heads; the names of the weights are those of public checkpoints."""

    config: MedusaConfig

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        width, count = config.hidden_size, config.num_heads
        rows = config.truncated_vocab_size or config.vocab_size
        self.blocks = nn.ModuleList([ResidualBlock(width, config.num_hidden_layers) for _ in range(count)])
        heads = 1 if config.shared_head else count
        self.lm_heads = nn.ModuleList([nn.Linear(width, rows, bias=False) for _ in range(heads)])
        self.post_init()

    def head(self, step: int) -> nn.Linear:
        head: nn.Linear = self.lm_heads[0 if self.config.shared_head else step]  # type: ignore[assignment]
        return head

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits `[B, n, Vd]` of all drafted tokens from the target's states `[B, H]`."""
        states = torch.stack([block(hidden) for block in self.blocks], dim=1)
        if self.config.shared_head:
            logits: Tensor = self.lm_heads[0](states)
            return logits
        return torch.stack([head(states[:, k]) for k, head in enumerate(self.lm_heads)], dim=1)

    def rollout(self, text: Text) -> Iterator[Tensor]:
        features = text.features
        for block in self.blocks:
            yield block(features.to(self.dtype))
            features = shifted(features)


@torch.no_grad()
def start_medusa(
    target: PreTrainedModel, vocab: Tensor | None, num_heads: int, *, shared_head: bool
) -> MedusaModel:
    """The heads that training starts from: residual blocks that change nothing, and the rows of `vocab`
    (int64 `[Vd]`) of the target's head.
    """
    rows = target.get_output_embeddings().weight
    full = len(rows)
    rows = rows if vocab is None else rows[vocab]
    config = MedusaConfig(
        hidden_size=rows.shape[1],
        vocab_size=full,
        truncated_vocab_size=len(rows),
        num_heads=num_heads,
        shared_head=shared_head,
        tie_word_embeddings=False,
    )
    model = MedusaModel(config)
    for weight in model.blocks.parameters():
        weight.zero_()
    for weight in model.lm_heads.parameters():
        weight.copy_(rows)
    return model


class MedusaDrafter(ModelDrafter):
    """Drafts with Medusa's heads: one small forward for all tokens of a round, and no cache."""

    def make_runner(self, model: Any, rows: int, *, optimize: bool, int8: bool) -> Any:
        self.heads: MedusaModel = share_parameters(model).eval()
        if optimize and model.device.type == "cpu":
            quantize_linears(self.heads) if int8 else pack_linears(self.heads)
        return None

    def move(self, source: int, destination: int) -> None:
        """Nothing to move: a head looks at the target's newest state alone."""

    def catch_up(self, state: DraftState) -> None:
        """Nothing to read."""

    @torch.inference_mode()
    def draft(self, state: DraftState, count: int) -> Draft:
        return super().draft(state, min(count, self.heads.config.num_heads))

    def first(self, state: DraftState) -> Tensor:
        self.logits = self.heads(state.features.to(self.heads.dtype)).float()
        return self.logits[:, 0]

    def first_behind_tree(self, state: DraftState) -> Tensor:
        return self.first(state)

    def next(self, token: Tensor, step: int, state: DraftState) -> Tensor:
        return self.logits[:, step]

    def branch(self, tokens: Tensor, parents: Tensor, tree: Branches, state: DraftState) -> Tensor:
        step = int(tree.depths.max())
        return self.logits[:, step, None].expand(-1, tokens.shape[1], -1)

    def room(self, position: Tensor) -> int:
        return sys.maxsize  # nothing is written

    def timed_reading(self, length: int) -> Callable[[], Any]:
        return lambda: None

    def timed_steps(self, batch_size: int, position: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """All heads at once, and nothing after them."""
        hidden = torch.ones(batch_size, self.heads.config.hidden_size, dtype=self.heads.dtype)
        hidden = hidden.to(self.heads.device)

        @torch.inference_mode()
        def heads() -> Any:
            return self.heads(hidden).float().argmax(dim=-1)

        return heads, lambda: None
