"""Grouped-query attention that reads each key and value once, registered with transformers' attention
interface.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

FOLDED_ATTENTION = "folded_sdpa"


def folded_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Grouped-query attention without repeating keys and values: the query groups are folded into the query
    length.

    query `[B, KV * G, T, D]`, key and value `[B, KV, W, D]`, mask `[B, 1, G * T, W]` (already folded) -> `[B,
    T, KV * G, D]`.
    """
    batch, heads, width, size = query.shape
    kv_heads = key.shape[1]
    folded = query.reshape(batch, kv_heads, heads // kv_heads * width, size)
    out = nn.functional.scaled_dot_product_attention(
        folded, key, value, attn_mask=attention_mask, scale=scaling
    )
    return out.reshape(batch, heads, width, size).transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register(FOLDED_ATTENTION, folded_attention)
