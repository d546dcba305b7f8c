"""Target signals: what the target knew when it chose each completion token, kept from the sampling pass
itself.

With the last hidden state and the log-normaliser, the target's true probability of any subset of ids costs
one product with those rows of its head: training never runs the target again, and a reduced vocabulary never
needs the full head. Where hidden states are too large to keep, the most likely ids with their probabilities,
and the mass of all others together, take their place.

Shapes: N completion tokens, H hidden size, K ids kept of each, P positions that the target read, F width of
several layers' states side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from data.files import commit_file

if TYPE_CHECKING:
    import torch


@dataclass
class SignalRows:
    """Tensors with a row per completion token."""

    def __len__(self) -> int:
        return len(next(iter(self.tensors().values())))

    def tensors(self) -> dict[str, torch.Tensor]:
        """By their names, as they stand in a file; without what was not kept."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: tensor for name, tensor in found.items() if tensor is not None}


@dataclass
class Signals(SignalRows):
    """Signals of N completion tokens; row n belongs to the state that predicts token n."""

    hidden: torch.Tensor
    """`[N, H]`: the target's last hidden state after its final norm, in the target's dtype, or stored in half
    (`evaluation.signals.in_half` says what that may change)."""
    logsumexp: torch.Tensor
    """float32 `[N]`: log-normaliser over the full vocabulary of logits / signal temperature."""
    argmax: torch.Tensor
    """int64 `[N]`: the target's most likely id."""
    features: torch.Tensor | None = None
    """`[P, F]`: what entered the layers that a head draws on, at every position of prompt and answer but the
    last one's, in the target's dtype. None where it was not asked for."""


@dataclass
class TopK(SignalRows):
    """The K most likely ids at N completion tokens; row n belongs to the state that predicts token n."""

    ids: torch.Tensor
    """int32 `[N, K]`, the most likely first."""
    log_probs: torch.Tensor
    """float32 `[N, K]`: true log-probabilities at the signal temperature, normalised over all ids."""
    tail: torch.Tensor
    """float32 `[N]`: the mass of all other ids together, between 0 and 1."""


Kind = TypeVar("Kind", bound=SignalRows)


def concatenate(parts: Sequence[Kind]) -> Kind:
    """Signals of several completions, one after another."""
    import torch

    tensors = [part.tensors() for part in parts]
    return _same_kind(parts[0], {name: torch.cat([each[name] for each in tensors]) for name in tensors[0]})


def rows(signals: Kind, which: slice, positions: slice | None = None) -> Kind:
    """Those of some of the tokens; with the features of `positions`, where there are any."""
    slices = dict.fromkeys(signals.tensors(), which)
    if isinstance(signals, Signals) and signals.features is not None:
        slices["features"] = positions or slice(0, 0)
    return _same_kind(signals, {name: getattr(signals, name)[part] for name, part in slices.items()})


def _same_kind(like: Kind, tensors: dict[str, torch.Tensor]) -> Kind:
    make: Any = type(like)
    made: Kind = make(**tensors)
    return made


def write_signals(path: Path, parts: Sequence[Kind]) -> None:
    """One safetensors file with the signals of a shard's records in their order."""
    from safetensors.torch import save_file

    tensors = {name: tensor.contiguous() for name, tensor in concatenate(parts).tensors().items()}
    temporary = path.with_suffix(".tmp")
    save_file(tensors, temporary)
    commit_file(temporary, path)


def read_signals(path: Path) -> Signals | TopK:
    """The signals of a shard, memory-mapped: rows are read when they are used."""
    from safetensors.torch import load_file

    tensors = load_file(path)
    return TopK(**tensors) if "ids" in tensors else Signals(**tensors)
