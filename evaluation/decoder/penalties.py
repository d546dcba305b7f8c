"""What a token's logit owes to the text before it: penalties and bias, each position with its own prefix.

Inside a round the prefix of a position holds the drafted tokens before it, so a drafted token is judged by
the logits that plain decoding would have had. Shapes: B rows, S token slots, K drafted tokens, V target
vocabulary, Vd rows of a reduced draft head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from data.errors import UserError
from evaluation.decoder.sampling import SamplingOptions


@dataclass(frozen=True)
class Prefix:
    """How often each id stands in the text so far."""

    prompted: torch.Tensor
    """bool `[..., V]`: ids in the prompt."""
    counts: torch.Tensor
    """float32 `[..., V]`: occurrences in the answer."""

    @classmethod
    def of(
        cls, tokens: torch.Tensor, prompt_length: torch.Tensor, position: torch.Tensor, vocab_size: int
    ) -> Prefix:
        """From tokens int64 `[B, S]`: prompts of `prompt_length [B]`, then answers that end at `position [B]`
        (inclusive).
        """
        slots = torch.arange(tokens.shape[1], device=tokens.device)
        answered = (slots >= prompt_length[:, None]) & (slots <= position[:, None])
        empty = torch.zeros(tokens.shape[0], vocab_size, device=tokens.device)
        counts = empty.scatter_add(1, tokens, answered.float())
        prompted = empty.scatter_add(1, tokens, (slots < prompt_length[:, None]).float()) > 0
        return cls(prompted, counts)

    def followed_by(self, token: torch.Tensor) -> Prefix:
        """One answered token more, int64 `[...]`."""
        one = torch.ones_like(token, dtype=self.counts.dtype)
        return Prefix(self.prompted, self.counts.scatter_add(-1, token[..., None], one[..., None]))

    def pick(self, chosen: torch.Tensor) -> Prefix:
        """Of prefixes `[B, W, V]` those numbered `chosen`, int64 `[B, N]`: `[B, N, V]`."""
        return Prefix(self.prompted, self.counts.take_along_dim(chosen[..., None], dim=1))

    def along(self, drafted: torch.Tensor, ancestors: torch.Tensor | None = None) -> Prefix:
        """The prefixes `[B, K + 1, V]` before each drafted token of `[B, K]` and after the last; in a tree
        (`ancestors` bool `[B, K + 1, K + 1]`) after each column's path.
        """
        batch, count = drafted.shape
        steps = self.counts.new_zeros(batch, count + 1, self.counts.shape[-1])
        steps[:, 1:].scatter_(2, drafted[..., None], 1)
        passed = steps.cumsum(dim=1) if ancestors is None else ancestors.to(steps.dtype) @ steps
        return Prefix(self.prompted[:, None], self.counts[:, None] + passed)


class Adjustment:
    """The penalties and bias of `options` over a head: logits in, the logits that are sampled out."""

    def __init__(
        self,
        options: SamplingOptions,
        vocab_size: int,
        device: torch.device,
        vocab: torch.Tensor | None = None,
    ) -> None:
        """`vocab` int64 `[Vd]`: the target ids of a reduced head; None for the whole target vocabulary.

        UserError where `logit_bias` names an id that the target does not have.
        """
        self.options, self.vocab = options, vocab
        self.bias: torch.Tensor | None = None
        if options.logit_bias:
            last = max(options.logit_bias)
            if last >= vocab_size:
                raise UserError(f"logit_bias names id {last}; the target has ids 0 to {vocab_size - 1}.")
            bias = torch.zeros(vocab_size)
            for token, value in options.logit_bias.items():
                bias[token] = value
            self.bias = self.restricted(bias.to(device))

    def restricted(self, values: torch.Tensor) -> torch.Tensor:
        """`[..., V]` at the head's own ids."""
        return values if self.vocab is None else values[..., self.vocab]

    def __call__(self, logits: torch.Tensor, prefix: Prefix | None) -> torch.Tensor:
        """Logits `[..., V]` (of a reduced head `[..., Vd]`) after prefixes `[..., V]`; the same tensor where
        nothing is asked for.
        """
        options = self.options
        if options.penalises:
            assert prefix is not None, "penalties need the text so far"
            counts, prompted = self.restricted(prefix.counts), self.restricted(prefix.prompted)
            factor = options.repetition_penalty
            scaled = torch.where(logits > 0, logits / factor, logits * factor)
            logits = torch.where(prompted | (counts > 0), scaled, logits)
            logits = logits - options.frequency_penalty * counts
            logits = logits - options.presence_penalty * (counts > 0).to(logits.dtype)
        return logits if self.bias is None else logits + self.bias
