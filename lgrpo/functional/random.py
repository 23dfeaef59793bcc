"""Random numbers that depend only on a key, not on the batch, the rank or global random state."""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # the constants of SplitMix64, as signed 64-bit integers
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift a signed 64-bit integer without sign extension."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """Apply SplitMix64's finaliser; int64 products wrap around as required."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def _stream(seed: int, *key: Tensor | int) -> Tensor:
    device = next((part.device for part in key if isinstance(part, Tensor)), None)
    state = torch.tensor(seed, dtype=torch.int64, device=device)
    for part in key:
        state = _mix(state + _GOLDEN) ^ _mix(torch.as_tensor(part, dtype=torch.int64, device=device) * _GOLDEN + 1)
    return _mix(state)


def stream_seed(seed: int, position: int, *key: int) -> int:
    """Return a seed of 62 bits for a prompt, whose siblings use consecutive seeds; seeds of two prompts are far apart.

    A completion that is continued has the index of the sibling and the number of its tokens as ``key``.

    >>> stream_seed(0, 1) == stream_seed(0, 1), abs(stream_seed(0, 1) - stream_seed(0, 2)) > 1_000_000
    (True, True)
    """
    return int(_shift_right(_stream(seed, position, *key), 2))


def stream_uniform(seed: int, *key: Tensor | int) -> Tensor:
    """Return uniform numbers in [0, 1), float64, one for each element of the broadcast ``key``.

    An engine calls it with (position of the prompt, index of the sibling, index of the token).

    >>> both = stream_uniform(0, torch.tensor([5, 6]), 1)
    >>> alone = stream_uniform(0, torch.tensor([6]), 1)
    >>> both[1] == alone[0]
    tensor(True)
    """
    return _shift_right(_stream(seed, *key), 11).double() * 2.0**-53
