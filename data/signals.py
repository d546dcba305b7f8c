"""Target signals: what the target knew when it chose each completion token, kept from the sampling pass
itself.

With the last hidden state and the log-normaliser, the target's true probability of any subset of ids costs
one product with those rows of its head: training never runs the target again, and a reduced vocabulary never
needs the full head.

Shapes: N completion tokens, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from data.files import commit_file

if TYPE_CHECKING:
    import torch


@dataclass
class Signals:
    """Signals of N completion tokens; row n belongs to the state that predicts token n."""

    hidden: torch.Tensor
    """`[N, H]`: the target's last hidden state after its final norm, in the target's dtype."""
    logsumexp: torch.Tensor
    """float32 `[N]`: log-normaliser over the full vocabulary of logits / signal temperature."""
    argmax: torch.Tensor
    """int64 `[N]`: the target's most likely id."""

    def __len__(self) -> int:
        return self.hidden.shape[0]

    def rows(self, which: slice) -> Signals:
        """Those of some of the tokens."""
        return Signals(self.hidden[which], self.logsumexp[which], self.argmax[which])


def concatenate(parts: list[Signals]) -> Signals:
    """Signals of several completions, one after another."""
    import torch

    return Signals(
        torch.cat([part.hidden for part in parts]),
        torch.cat([part.logsumexp for part in parts]),
        torch.cat([part.argmax for part in parts]),
    )


def write_signals(path: Path, parts: list[Signals]) -> None:
    """One safetensors file with the signals of a shard's records in their order."""
    from safetensors.torch import save_file

    joined = concatenate(parts)
    tensors = {"hidden": joined.hidden, "logsumexp": joined.logsumexp, "argmax": joined.argmax}
    temporary = path.with_suffix(".tmp")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary)
    commit_file(temporary, path)


def read_signals(path: Path) -> Signals:
    """The signals of a shard, memory-mapped: rows are read when they are used."""
    from safetensors.torch import load_file

    return Signals(**load_file(path))
