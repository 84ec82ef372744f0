"""Keys and values of a decoding batch in buffers that rarely grow, and attention that does not repeat them per head."""

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.cache_utils import Cache

ATTENTION = "pacs_grouped_queries"
"""name of `grouped_attention` in transformers"""

_GROW_TOKENS = 64
"""smallest growth of a buffer"""


class DecodingCache(Cache):
    """A `transformers` cache with preallocated buffers; `keep` selects rows.

    DynamicCache concatenates, copying everything at each token and layer; this writes one column.
    """

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[])
        self._keys: list[torch.Tensor | None] = [None] * num_layers
        self._values: list[torch.Tensor | None] = [None] * num_layers
        self._lengths = [0] * num_layers

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends [b, kv heads, new, head dim] and returns views on all of it, [b, kv heads, length, head dim]."""
        start = self._lengths[layer_idx]
        end = start + key_states.shape[2]
        keys = self._keys[layer_idx] = _grown(self._keys[layer_idx], key_states, start, end)
        values = self._values[layer_idx] = _grown(self._values[layer_idx], value_states, start, end)
        keys[:, :, start:end] = key_states
        values[:, :, start:end] = value_states
        self._lengths[layer_idx] = end
        return keys[:, :, :end], values[:, :, :end]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._lengths[layer_idx]

    def keep(self, rows: torch.Tensor) -> None:
        """Keeps `rows` (int64 [m], repeats allowed), in this order."""
        for buffers in (self._keys, self._values):
            for layer, buffer in enumerate(buffers):
                if buffer is not None:
                    buffers[layer] = buffer.index_select(0, rows)


def _grown(buffer: torch.Tensor | None, new: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """`buffer`, or a copy of its first `start` columns with space for `end` columns."""
    if buffer is not None and buffer.shape[2] >= end:
        return buffer
    batch, heads, _, dim = new.shape
    larger = new.new_empty(batch, heads, max(end + _GROW_TOKENS, end * 3 // 2), dim)
    if buffer is not None:
        larger[:, :, :start] = buffer[:, :, :start]
    return larger


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of `transformers`' interface: [b, heads, q, d] -> [b, q, heads, d], mask additive [b, 1, q, kv].

    With one query token the heads that share a key head become the rows of one product, so keys and values are not
    copied once for each of them.
    """
    batch, heads, queries, dim = query.shape
    kv_heads = key.shape[1]
    scaling: float = kwargs["scaling"]
    if queries == 1:
        grouped = query.reshape(batch, kv_heads, heads // kv_heads, dim)
        out = scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
        return out.reshape(batch, 1, heads, dim), None
    out = scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=heads != kv_heads
    )
    return out.transpose(1, 2), None


AttentionInterface.register(ATTENTION, grouped_attention)
