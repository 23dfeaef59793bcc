"""A fingerprint of a tensor's bits, fast enough to take of every weight at every sync."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Mapping
from functools import lru_cache

import torch
from torch import Tensor

_CHUNK = 2**21
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SHIFT, _STEP, _START = 0x1000193, 0x5851F42C, 0x14057B7F
"""An even step from an odd start: every place counts by an odd number, which takes no bit away."""


@torch.no_grad()
def tensor_checksum(tensor: Tensor) -> Tensor:
    """64 bits that depend on every bit and its place, the same on every device; int64, where the tensor is.

    >>> bool(tensor_checksum(torch.tensor([1.0, 2.0])) == tensor_checksum(torch.tensor([2.0, 1.0])))
    False
    """
    bits = tensor.detach().contiguous().flatten()
    bits = bits.view(_BITS[bits.element_size()])
    if bits.numel() % (8 // bits.element_size()) == 0:  # eight bytes at a time
        is_aligned = bits.storage_offset() * bits.element_size() % 8 == 0
        bits = (bits if is_aligned else bits.clone()).view(torch.int64)
    # The sum of (bits + _SHIFT) · (place · _STEP + _START), modulo 2**64, in as few operations as go: on a GPU each of
    # them takes longer to start than to finish. Before, the upper half of the bits is folded into the lower: of the
    # uppermost, where signs are, a sum knows only whether they are even in number.
    count = bits.numel()
    shift = _wrapped(_SHIFT * (count * (count - 1) // 2 * _STEP + count * _START))
    if bits.is_cuda and (weighted_sum := _kernel(bits.device)) is not None:
        return weighted_sum(bits, _STEP, _START) + shift
    total = torch.full((), shift, dtype=torch.int64, device=bits.device)
    for start in range(0, count, _CHUNK):
        piece = bits[start : start + _CHUNK].to(torch.int64)
        folded = (piece >> 31).bitwise_xor_(piece)
        if start:
            total += folded.sum() * _wrapped(start * _STEP)
        total += folded.mul_(_places(bits.device)[: piece.numel()]).sum()
    return total


@lru_cache
def _kernel(device: torch.device) -> Callable[[Tensor, int, int], Tensor] | None:
    """All of it in one pass over the bits, where Triton works; the operations above take a dozen."""
    try:
        from lgrpo.functional.checksum_kernel import weighted_sum

        weighted_sum(torch.zeros(1, dtype=torch.int64, device=device), _STEP, _START)
    except Exception as error:  # what Triton misses, a compiler say, shows when it is first used
        if not isinstance(error, ImportError):
            warnings.warn(f"syncs take a little longer, since Triton does not work here: {error}", stacklevel=2)
        return None
    return weighted_sum


@lru_cache
def _places(device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.arange(_CHUNK, dtype=torch.int64, device=device).mul_(_STEP).add_(_START)


def _wrapped(number: int) -> int:
    """As an int64 would have it that ran over.

    >>> _wrapped(2**63), _wrapped(2**64 + 1)
    (-9223372036854775808, 1)
    """
    return (number + 2**63) % 2**64 - 2**63


def as_numbers(checksums: Mapping[str, Tensor]) -> dict[str, int]:
    """Checksums as numbers, fetched from their device all at once."""
    if not checksums:
        return {}
    device = next(iter(checksums.values())).device
    fetched = torch.stack([checksum.to(device) for checksum in checksums.values()]).tolist()
    return {name: number & 0xFFFFFFFFFFFFFFFF for name, number in zip(checksums, fetched, strict=True)}


def combined_checksum(checksums: Mapping[str, int]) -> str:
    """One short word for a whole model.

    >>> combined_checksum({"a": 1, "b": 2}) == combined_checksum({"b": 2, "a": 1})
    True
    """
    text = "\n".join(f"{name} {checksums[name]:016x}" for name in sorted(checksums))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
