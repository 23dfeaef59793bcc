"""A fingerprint of a tensor's bits, fast enough to take of every weight at every sync."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

_CHUNK = 2**22
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, bits.numel(), _CHUNK):
        piece = bits[start : start + _CHUNK].to(torch.int64)
        place = torch.arange(start, start + piece.numel(), dtype=torch.int64, device=bits.device)
        total += (piece + 0x1000193).mul_(place.mul_(0x5851F42D).add_(0x14057B7F)).sum()  # int64 wraps around
    return total


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
