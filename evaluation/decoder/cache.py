"""A static key-value cache in which every row writes at its own position.

Rows are left aligned: the entry of position `i` stands in slot `i`. Rolling back moves a row's position; the
rejected entries stay, masked, until they are overwritten: a rollback crops and copies nothing.

Shapes: B rows, T new tokens, S slots, W slots that the current forward may look at, H key-value heads, D head
size.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


class RaggedLayer(CacheLayerMixin):
    """Keys and values of one layer, `[B, H, S, D]`, written by scatter at the owner's `index`."""

    is_compileable = True
    is_sliding = False

    def __init__(self, owner: RaggedCache) -> None:
        super().__init__()
        self.owner = owner

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        owner = self.owner

        def empty(states: torch.Tensor) -> torch.Tensor:
            return states.new_zeros(owner.num_rows, states.shape[1], owner.length, states.shape[-1])

        # Sized apart: some attentions store keys and values of two widths.
        self.keys, self.values = empty(key_states), empty(value_states)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        owner = self.owner
        keys, values = self.keys[owner.rows], self.values[owner.rows]
        index = owner.index[:, None, :, None]  # [B, 1, T, 1]
        keys.scatter_(2, index.expand_as(key_states), key_states)
        values.scatter_(2, index.expand_as(value_states), value_states)
        return keys[:, :, : owner.window], values[:, :, : owner.window]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.window, 0

    def get_seq_length(self) -> int:
        # Positions are always given explicitly; a forward that asks for them would be silently wrong.
        raise AssertionError("a ragged cache has no single length: pass position_ids and a mask")

    def get_max_length(self) -> int:
        return self.owner.length


class RaggedCache(Cache):
    """Cache of `batch_size` rows by `length` slots for `num_layers` layers; `place` says where the next
    forward writes.
    """

    def __init__(self, num_layers: int, batch_size: int, length: int) -> None:
        super().__init__(layers=[RaggedLayer(self) for _ in range(num_layers)])
        self.num_rows = batch_size
        self.length = length
        self.rows = slice(0, batch_size)
        self.index = torch.zeros(batch_size, 1, dtype=torch.int64)
        self.window = length

    def place(self, index: torch.Tensor, rows: slice, window: int) -> None:
        """The next forward writes rows `rows` at slots `index` (int64 `[B, T]`) and reads slots `[0,
        window)`.
        """
        assert window <= self.length, f"window {window} exceeds the cache's {self.length} slots"
        self.index, self.rows, self.window = index, rows, window

    def copy_prefix(self, source: int, destination: int | slice, length: int) -> None:
        """Copy the first `length` entries of row `source` to row or rows `destination` (a prompt prefix
        computed once).
        """
        for layer in self.layers:
            layer.keys[destination, :, :length] = layer.keys[source, :, :length]
            layer.values[destination, :, :length] = layer.values[source, :, :length]

    def keep(self, rows: slice, source: torch.Tensor, first: torch.Tensor) -> None:
        """Move the entries of rows `rows` at slots `source` (int64 `[B, D]`) to the D slots from `first [B]`
        on.
        """
        slots = first[:, None] + torch.arange(source.shape[1], device=source.device)
        if torch.equal(source, slots):
            return
        for layer in self.layers:
            for entries in (layer.keys[rows], layer.values[rows]):
                shape = (-1, entries.shape[1], -1, entries.shape[3])
                moved = entries.gather(2, source[:, None, :, None].expand(shape))
                entries.scatter_(2, slots[:, None, :, None].expand(shape), moved)
