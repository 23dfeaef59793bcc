"""Causal attention over packed sequences, without padding between them."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import varlen
from torch.nn.functional import scaled_dot_product_attention

_HAS_WINDOW_SIZE = "window_size" in inspect.signature(varlen.varlen_attn).parameters  # older versions have is_causal
_LARGEST_HEAD = 256
"""Largest head of torch's kernel for variable lengths; Gemma 4 has larger ones."""


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, scale: float, window: int | None = None
) -> Tensor:
    """Compute the attention of each token to its predecessors in its sequence; [N, heads, D] in and out.

    ``bounds`` [B + 1] int32 are the offsets at which sequences begin, and N; ``longest`` is the length of the longest.
    ``window`` is the largest number of tokens, itself included, that a token attends to. Keys and values may have fewer
    heads, which are shared.

    >>> q, k, v = (torch.randn(5, 2, 8) for _ in range(3))
    >>> both = packed_attention(q, k, v, torch.tensor([0, 2, 5], dtype=torch.int32), 3, 0.5)
    >>> second = packed_attention(q[2:], k[2:], v[2:], torch.tensor([0, 3], dtype=torch.int32), 3, 0.5)
    >>> torch.allclose(both[2:], second)
    True
    """
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] <= _LARGEST_HEAD:
        return _varlen(query, key, value, bounds, longest, scale, window)
    return _padded(query, key, value, bounds, longest, scale, window)


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, scale: float, window: int | None
) -> Tensor:
    """Use torch's kernel for variable lengths."""
    heads_per_key = query.shape[1] // key.shape[1]
    if heads_per_key > 1:
        key, value = key.repeat_interleave(heads_per_key, 1), value.repeat_interleave(heads_per_key, 1)
    options: dict[str, Any] = {"is_causal": True}
    if _HAS_WINDOW_SIZE:
        options = {"window_size": (-1 if window is None else window - 1, 0)}
    elif window is not None and window < longest:
        return _padded(query, key, value, bounds, longest, scale, window)
    return varlen.varlen_attn(query, key, value, bounds, bounds, longest, longest, scale=scale, **options)  # type: ignore[return-value]


def _padded(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, scale: float, window: int | None
) -> Tensor:
    """Use torch's attention on temporarily padded sequences."""
    column = torch.arange(longest, device=query.device)
    count, size = len(bounds) - 1, query.shape[0]
    if is_ragged := size != count * longest:
        starts, lengths = bounds[:-1].long(), bounds.diff().long()
        indices = torch.where(column < lengths[:, None], starts[:, None] + column, 0)
        query, key, value = (states[indices] for states in (query, key, value))
    else:
        query, key, value = (states.unflatten(0, (count, longest)) for states in (query, key, value))
    query, key, value = (states.transpose(1, 2) for states in (query, key, value))
    mask = None
    if window is not None and window < longest:
        distance = column[:, None] - column
        mask = (distance >= 0) & (distance < window)
    is_shared = query.shape[1] != key.shape[1]
    attended = scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=is_shared
    )
    attended = attended.transpose(1, 2).flatten(0, 1)
    if not is_ragged:
        return attended
    token = torch.arange(size, device=query.device)  # by index, not by a mask: a compiler knows their number
    row = torch.searchsorted(bounds[1:].long(), token, right=True)
    return attended[row * longest + token - starts[row]]
