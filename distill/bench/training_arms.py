"""The arms of `distill bench training`, each as its own project takes the step:

- `ours`: the target's forward pass in the step, the loss a block at a time (`signal: live`);
- `ours_hidden`: the same with the target's states at hand (`signal: hidden`);
- `gkd`: trl's GKD: full logits of both models, then its generalised JSD at beta 0;
- `trl_chunked`: the kernel of trl's DistillationTrainer: both models' hidden states, tiles of the vocabulary.

Memory is the peak above what the process held before the step: resident memory on a CPU, allocated memory on
a GPU.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
from trl.experimental.gkd import GKDTrainer
from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

from data.records import Batch
from data.signals import Signals
from distill.bench.training import Shape
from distill.chunked import chunked_loss
from distill.heads import TargetRows
from evaluation.signals import completion_states, target_signals

MIB = 1 << 20


class Step:
    """One drafter, one target and one batch; an arm's `loss` is summed over its completion tokens."""

    def __init__(self, name: str, shape: Shape) -> None:
        self.name, self.shape = name, shape
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.target = self._model(shape.target_layers, seed=0).eval().requires_grad_(False)
        self.drafter = self._model(shape.draft_layers, seed=1).train()
        self.drafter.get_input_embeddings().requires_grad_(False)
        size = (shape.rows, shape.prompt + shape.completion)
        ids = torch.randint(shape.vocab_size, size, generator=torch.Generator().manual_seed(2))
        self.ids = ids.to(self.device)
        self.target_head = self.target.lm_head.weight
        self.cached: Signals | None = None
        if name == "ours_hidden":
            self.cached = target_signals(self.target, self.batch(shape.rows), 1.0)
            del self.target

    def _model(self, layers: int, seed: int) -> LlamaForCausalLM:
        shape = self.shape
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_hidden_layers=layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=max(1, shape.heads // 3),
            tie_word_embeddings=False,
        )
        with torch.device(self.device):  # drawing the weights on a CPU would take longer than the steps
            model = LlamaForCausalLM(config)
        return model.to(torch.bfloat16 if self.device == "cuda" else torch.float32)

    def batch(self, rows: int) -> Batch:
        """The first `rows` rows."""
        ids = self.ids[:rows]
        mask = torch.zeros_like(ids, dtype=torch.bool)
        mask[:, self.shape.prompt :] = True
        return Batch(ids, torch.ones_like(ids), mask, None)

    def loss(self, rows: int) -> Tensor:
        """Forward KL of the first `rows` rows as this arm computes it."""
        if self.name == "gkd":
            completion = slice(self.shape.prompt - 1, -1)
            drafted = self.drafter(input_ids=self.ids[:rows]).logits[:, completion]
            with torch.no_grad():
                told = self.target(input_ids=self.ids[:rows]).logits[:, completion]
            return gkd(drafted, told)
        batch = self.batch(rows)
        states = completion_states(self.drafter, batch.input_ids, batch.completion_mask)
        head = self.drafter.lm_head.weight
        if self.cached is not None:
            count = len(states)
            kept = self.cached
            target = TargetRows(kept.hidden[:count], self.target_head, kept.logsumexp[:count])
        else:
            with torch.no_grad():
                told = completion_states(self.target, batch.input_ids, batch.completion_mask)
            if self.name == "trl_chunked":
                return trl_chunked(states, head, told, self.target_head)
            target = TargetRows(told, self.target_head, None)
        return chunked_loss("forward_kl", states, head, target=target).loss


def gkd(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """trl's loss over full logits [B, T, V], at beta 0: forward KL."""
    return GKDTrainer.generalized_jsd_loss(draft_logits, target_logits, beta=0, num_items_in_batch=1)


def trl_chunked(hidden: Tensor, head: Tensor, target_hidden: Tensor, target_head: Tensor) -> Tensor:
    """trl's kernel at beta 0."""
    divergence, _ = ChunkedDivergenceFunction.apply(
        hidden, head, None, target_hidden, target_head, None, 0.0, 1.0, 1.0, None, 1.0, None
    )
    return divergence.sum()


def train_steps(name: str, shape: Shape) -> dict[str, float]:
    """Whole training steps of one arm, forward, backward and AdamW: the loss per token in the first, speed,
    memory."""
    step = Step(name, shape)
    trained = [parameter for parameter in step.drafter.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)

    def one(rows: int) -> float:
        loss = step.loss(rows) / (rows * shape.completion)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    one(1)  # warms up, and makes the optimizer's state
    peak = Peak(step.device)
    started = time.perf_counter()
    losses = [one(shape.rows) for _ in range(shape.steps)]
    seconds = time.perf_counter() - started
    return {
        "loss": losses[0],
        "tokens_per_second": shape.steps * shape.rows * shape.completion / seconds,
        "peak_mib": peak.above(),
        "total_mib": peak.total(),
    }


def loss_peak(name: str, shape: Shape, tokens: int) -> float:
    """MiB that a loss and its gradients take at their peak, from random hidden states, without models."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)

    def draw(rows: int) -> Tensor:
        return (torch.randn(rows, shape.hidden_size, generator=generator) / 24).to(device)

    hidden, target_hidden, head, target_head = map(draw, (tokens, tokens, shape.vocab_size, shape.vocab_size))
    hidden.requires_grad_()
    head.requires_grad_()
    peak = Peak(device)
    if name == "gkd":
        loss = gkd((hidden @ head.T).unsqueeze(0), (target_hidden @ target_head.T).unsqueeze(0))
    elif name == "trl_chunked":
        loss = trl_chunked(hidden, head, target_hidden, target_head)
    else:
        rows = TargetRows(target_hidden, target_head, None)
        loss = chunked_loss("forward_kl", hidden, head, target=rows).loss
    loss.backward()
    return peak.above()


class Peak:
    """The memory of this process from now on: its peak, and how far that is above what it holds now."""

    def __init__(self, device: str) -> None:
        self.device = device
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated() / MIB
        else:
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
            self.before = self._resident("VmRSS")

    def total(self) -> float:
        """MiB at the peak."""
        if self.device == "cuda":
            return torch.cuda.max_memory_allocated() / MIB
        return self._resident("VmHWM")

    def above(self) -> float:
        """MiB at the peak, less those held at the beginning."""
        return self.total() - self.before

    @staticmethod
    def _resident(key: str) -> float:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) / 1024
        raise RuntimeError(f"this system does not tell {key}")
