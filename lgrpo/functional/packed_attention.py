"""Causal attention over packed sequences, without padding between them."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import varlen
from torch.nn.functional import scaled_dot_product_attention

_HAS_WINDOW_SIZE = "window_size" in inspect.signature(varlen.varlen_attn).parameters  # older versions have is_causal
_LARGEST_HEAD = 256
"""Largest head of torch's kernel for variable lengths; Gemma 4 has larger ones."""


class Keys(NamedTuple):
    """Keys of sequences that have their first tokens in common with others and hold only their last ones."""

    tokens: Tensor
    """[K] int64: which of the N tokens each key is, sequence after sequence."""
    bounds: Tensor
    """[B + 1] int32: offsets at which the keys of sequences begin, and K."""
    longest: int
    """Number of keys of the longest sequence."""


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    longest: int,
    scale: float,
    window: int | None = None,
    keys: Keys | None = None,
) -> Tensor:
    """Compute the attention of each token to its predecessors in its sequence; [N, heads, D] in and out.

    ``bounds`` [B + 1] int32 are the offsets at which sequences begin, and N; ``longest`` is the length of the longest.
    ``window`` is the largest number of tokens, itself included, that a token attends to. Keys and values may have fewer
    heads, which are shared. With ``keys`` a sequence holds the last tokens only, and its keys are those of all.

    >>> q, k, v = (torch.randn(5, 2, 8) for _ in range(3))
    >>> both = packed_attention(q, k, v, torch.tensor([0, 2, 5], dtype=torch.int32), 3, 0.5)
    >>> second = packed_attention(q[2:], k[2:], v[2:], torch.tensor([0, 3], dtype=torch.int32), 3, 0.5)
    >>> torch.allclose(both[2:], second)
    True

    Tokens 0, 1, 2 and 0, 1, 3, 4 as two sequences:

    >>> keys = Keys(torch.tensor([0, 1, 2, 0, 1, 3, 4]), torch.tensor([0, 3, 7], dtype=torch.int32), 4)
    >>> both = packed_attention(q, k, v, torch.tensor([0, 3, 5], dtype=torch.int32), 3, 0.5, keys=keys)
    >>> second = [states[[0, 1, 3, 4]] for states in (q, k, v)]
    >>> torch.allclose(both[3:], packed_attention(*second, torch.tensor([0, 4], dtype=torch.int32), 4, 0.5)[2:])
    True
    """
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if keys is not None:  # in float32, in which the gradients of a shared token are then summed
        key, value = (states.float().index_select(0, keys.tokens).to(states.dtype) for states in (key, value))
    has_kernel = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] <= _LARGEST_HEAD
    attend = _varlen if has_kernel else _padded
    return attend(query, key, value, bounds, longest, scale, window, keys)


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    longest: int,
    scale: float,
    window: int | None,
    keys: Keys | None,
) -> Tensor:
    """Use torch's kernel for variable lengths. Queries are the last tokens if there are more keys."""
    heads_per_key = query.shape[1] // key.shape[1]
    if heads_per_key > 1:
        key, value = key.repeat_interleave(heads_per_key, 1), value.repeat_interleave(heads_per_key, 1)
    key_bounds, longest_key = (bounds, longest) if keys is None else (keys.bounds, keys.longest)
    options: dict[str, Any] = {"is_causal": True}
    if _HAS_WINDOW_SIZE:
        options = {"window_size": (-1 if window is None else window - 1, 0)}
    elif window is not None and window < longest_key:
        return _padded(query, key, value, bounds, longest, scale, window, keys)
    return varlen.varlen_attn(  # type: ignore[return-value]
        query, key, value, bounds, key_bounds, longest, longest_key, scale=scale, **options
    )


def _padded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    longest: int,
    scale: float,
    window: int | None,
    keys: Keys | None,
) -> Tensor:
    """Use torch's attention on temporarily padded sequences."""
    size = query.shape[0]
    is_ragged = size != (len(bounds) - 1) * longest
    key_bounds, longest_key = (bounds, longest) if keys is None else (keys.bounds, keys.longest)
    query = _pad(query, bounds, longest)
    key, value = _pad(key, key_bounds, longest_key), _pad(value, key_bounds, longest_key)
    mask = None
    if keys is not None:
        last = key_bounds.diff().long()[:, None] - 1
        place = (last + 1 - bounds.diff().long()[:, None] + torch.arange(longest, device=query.device)).clamp(max=last)
        mask = _mask(place[:, None, :, None], longest_key, window)
    elif window is not None and window < longest:
        mask = _mask(torch.arange(longest, device=query.device)[:, None], longest, window)
    is_shared = query.shape[1] != key.shape[1]
    attended = scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=is_shared
    )
    attended = attended.transpose(1, 2).flatten(0, 1)
    if not is_ragged:
        return attended
    token = torch.arange(size, device=query.device)  # by index, not by a mask: a compiler knows their number
    row = torch.searchsorted(bounds[1:].long(), token, right=True)
    return attended[row * longest + token - bounds[:-1].long()[row]]


def _pad(states: Tensor, bounds: Tensor, longest: int) -> Tensor:
    """Return the states [N, heads, D] of sequences as [B, heads, longest, D]; what follows a sequence is arbitrary."""
    count = len(bounds) - 1
    if states.shape[0] == count * longest:
        return states.unflatten(0, (count, longest)).transpose(1, 2)
    column = torch.arange(longest, device=states.device)
    starts, lengths = bounds[:-1].long(), bounds.diff().long()
    return states[torch.where(column < lengths[:, None], starts[:, None] + column, 0)].transpose(1, 2)


def _mask(place: Tensor, longest_key: int, window: int | None) -> Tensor:
    """Return which keys the queries at these places of their sequences attend to."""
    distance = place - torch.arange(longest_key, device=place.device)
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)
