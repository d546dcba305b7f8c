"""Prompt look-up, the untrained drafter that every trained one has to beat."""

from __future__ import annotations

import torch

from evaluation.decoder.drafters import Draft, DraftState


class NgramDrafter:
    """Prompt look-up: copy what followed the latest earlier occurrence of the last tokens. Untrained, the
    control.

    Looks for the longest match of `longest` down to `shortest` tokens (Saxena 2023, "prompt lookup
    decoding").
    """

    capturable = follows = False

    def __init__(self, longest: int = 3, shortest: int = 1) -> None:
        self.longest, self.shortest = longest, shortest

    def start(self, row: int) -> None:
        """Nothing to prepare: the look-up reads the row's tokens."""

    def move(self, source: int, destination: int) -> None:
        """Nothing to move."""

    def prepare(self, state: DraftState, count: int) -> None:
        """Nothing to prepare."""

    def draft(self, state: DraftState, count: int) -> Draft:
        if count == 0:
            return Draft.none(state.position)
        batch = state.position.shape[0]
        ids = torch.zeros(batch, count, dtype=torch.int64)
        proposed = torch.zeros(batch, dtype=torch.int64)
        for row, end in enumerate((state.position + 1).tolist()):
            found = self.look_up(state.tokens[row, :end].tolist(), count)
            ids[row, : len(found)] = torch.tensor(found, dtype=torch.int64)
            proposed[row] = len(found)
        width = int(proposed.max())
        device = state.position.device
        return Draft(ids[:, :width].to(device), proposed.to(device), None)

    def look_up(self, tokens: list[int], count: int) -> list[int]:
        """The up to `count` tokens that followed the latest earlier occurrence of the longest matching
        suffix.
        """
        for size in range(min(self.longest, len(tokens) - 1), self.shortest - 1, -1):
            suffix = tokens[-size:]
            for start in range(len(tokens) - size - 1, -1, -1):
                if tokens[start : start + size] == suffix:
                    return tokens[start + size : start + size + count]
        return []
