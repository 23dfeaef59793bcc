"""Checksums of a tensor's bits, fast enough for every weight at every sync."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from lgrpo.functional.chunks import CHUNK_BYTES, chunks, joined

_BLOCK = 2**21
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SHIFT, _STEP, _START = 0x1000193, 0x5851F42C, 0x14057B7F
"""Element i is multiplied by i · _STEP + _START. All these weights are odd, so no bit of any element is lost."""


@torch.no_grad()
def tensor_checksum(tensor: Tensor) -> Tensor:
    """Return 64 bits that depend on every bit and its index, equal on all devices; int64, on the tensor's device.

    >>> bool(tensor_checksum(torch.tensor([1.0, 2.0])) == tensor_checksum(torch.tensor([2.0, 1.0])))
    False
    """
    if tensor.is_cuda and _kernel(tensor.device) is not None:
        return tensor_checksums([tensor])[0]
    bits = _bits(tensor)
    # Sum of (bits + _SHIFT) · (index · _STEP + _START), modulo 2**64, in few operations, because on a GPU each takes
    # longer to launch than to run. Before that, the upper half of the bits is folded into the lower half: of the
    # uppermost bits, which hold signs, a sum keeps only the parity.
    total = torch.full((), _shift(bits.numel()), dtype=torch.int64, device=bits.device)
    for start in range(0, bits.numel(), _BLOCK):
        piece = bits[start : start + _BLOCK].to(torch.int64)
        folded = (piece >> 31).bitwise_xor_(piece)
        if start:
            total += folded.sum() * _wrapped(start * _STEP)
        total += folded.mul_(_weights(bits.device)[: piece.numel()]).sum()
    return total


@torch.no_grad()
def tensor_checksums(tensors: Sequence[Tensor]) -> Tensor:
    """Return ``tensor_checksum`` of each, int64, on the device of the first. On a GPU all are read together.

    >>> pair = torch.tensor([1.0, 2.0]), torch.tensor([3.0])
    >>> [int(each) for each in tensor_checksums(pair)] == [int(tensor_checksum(each)) for each in pair]
    True
    """
    device = tensors[0].device
    weighted_sums = _kernel(device) if device.type == "cuda" else None
    if weighted_sums is None or any(tensor.device != device for tensor in tensors):
        return torch.stack([tensor_checksum(tensor).to(device) for tensor in tensors])
    bits = [tensor if _is_aligned(tensor) else _bits(tensor) for tensor in tensors]
    words = [8 if _is_aligned(each) else each.element_size() for each in bits]
    shifts = [_shift(each.nbytes // size) for each, size in zip(bits, words, strict=True)]
    return weighted_sums(bits, words, _STEP, _START).add_(torch.tensor(shifts).to(device, non_blocking=True))


def named_checksums(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    """Return checksums by name. A tensor must stay unchanged until the iterator has yielded ``CHUNK_BYTES`` more."""
    names: list[str] = []
    sums: list[Tensor] = []
    for chunk in chunks(tensors, CHUNK_BYTES):
        names += chunk
        sums.append(tensor_checksums(list(chunk.values())))
    return dict(zip(names, as_numbers(sums), strict=True))


def _bits(tensor: Tensor) -> Tensor:
    """View a tensor's bits as integers, of eight bytes each if the size is a multiple of that."""
    bits = tensor.detach().contiguous().flatten()
    bits = bits.view(_BITS[bits.element_size()])
    per_word = 8 // bits.element_size()
    if bits.numel() % per_word == 0:
        is_unaligned = bits.data_ptr() % 8 or bits.storage_offset() % per_word  # an empty tensor has no address
        bits = (bits.clone() if is_unaligned else bits).view(torch.int64)
    return bits


def _is_aligned(tensor: Tensor) -> bool:
    """Return whether the kernel can read it in words of eight bytes; faster than making a view."""
    return tensor.is_contiguous() and not (tensor.nbytes | tensor.data_ptr()) % 8


def _shift(count: int) -> int:
    """Return the part of ``_SHIFT`` in a sum over ``count`` elements."""
    return _wrapped(_SHIFT * (count * (count - 1) // 2 * _STEP + count * _START))


@lru_cache
def _kernel(device: torch.device) -> Callable[[Sequence[Tensor], Sequence[int], int, int], Tensor] | None:
    """Return the Triton kernel, which needs one pass instead of a dozen operations; None if Triton does not work."""
    try:
        from lgrpo.functional.checksum_kernel import weighted_sums

        weighted_sums([torch.zeros(1, dtype=torch.int64, device=device)], [8], _STEP, _START)
    except Exception as error:  # a missing dependency of Triton, such as a compiler, shows at first use
        if not isinstance(error, ImportError):
            warnings.warn(f"syncs take slightly longer, because Triton does not work here: {error}", stacklevel=2)
        return None
    return weighted_sums


@lru_cache
def _weights(device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.arange(_BLOCK, dtype=torch.int64, device=device).mul_(_STEP).add_(_START)


def _wrapped(number: int) -> int:
    """Wrap an integer to the range of int64.

    >>> _wrapped(2**63), _wrapped(2**64 + 1)
    (-9223372036854775808, 1)
    """
    return (number + 2**63) % 2**64 - 2**63


def as_numbers(checksums: Sequence[Tensor]) -> list[int]:
    """Return checksums as Python numbers, copied from their device together, because each copy waits for it."""
    return [number & 0xFFFFFFFFFFFFFFFF for number in joined(checksums).tolist()]


def combined_checksum(checksums: Mapping[str, int]) -> str:
    """Return one short checksum of a whole model.

    >>> combined_checksum({"a": 1, "b": 2}) == combined_checksum({"b": 2, "a": 1})
    True
    """
    text = "\n".join(f"{name} {checksums[name]:016x}" for name in sorted(checksums))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
