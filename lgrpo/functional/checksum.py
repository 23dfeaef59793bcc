"""A fingerprint of a tensor's bits, fast enough to take of every weight at every sync."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from lgrpo.functional.chunks import AT_ONCE, chunks, joined

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
    if tensor.is_cuda and _kernel(tensor.device) is not None:
        return tensor_checksums([tensor])[0]
    bits = _bits(tensor)
    # The sum of (bits + _SHIFT) · (place · _STEP + _START), modulo 2**64, in as few operations as go: on a GPU each of
    # them takes longer to start than to finish. Before, the upper half of the bits is folded into the lower: of the
    # uppermost, where signs are, a sum knows only whether they are even in number.
    total = torch.full((), _shift(bits.numel()), dtype=torch.int64, device=bits.device)
    for start in range(0, bits.numel(), _CHUNK):
        piece = bits[start : start + _CHUNK].to(torch.int64)
        folded = (piece >> 31).bitwise_xor_(piece)
        if start:
            total += folded.sum() * _wrapped(start * _STEP)
        total += folded.mul_(_places(bits.device)[: piece.numel()]).sum()
    return total


@torch.no_grad()
def tensor_checksums(tensors: Sequence[Tensor]) -> Tensor:
    """``tensor_checksum`` of each; int64, where the first of them is. On a GPU all are read at once.

    >>> pair = torch.tensor([1.0, 2.0]), torch.tensor([3.0])
    >>> [int(each) for each in tensor_checksums(pair)] == [int(tensor_checksum(each)) for each in pair]
    True
    """
    device = tensors[0].device
    weighted_sums = _kernel(device) if device.type == "cuda" else None
    if weighted_sums is None or any(tensor.device != device for tensor in tensors):
        return torch.stack([tensor_checksum(tensor).to(device) for tensor in tensors])
    bits = [tensor if _is_even(tensor) else _bits(tensor) for tensor in tensors]
    words = [8 if _is_even(each) else each.element_size() for each in bits]
    shifts = [_shift(each.nbytes // size) for each, size in zip(bits, words, strict=True)]
    return weighted_sums(bits, words, _STEP, _START).add_(torch.tensor(shifts).to(device, non_blocking=True))


def named_checksums(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    """Checksums as numbers. Each tensor must stay as it is until some more were taken."""
    names: list[str] = []
    sums: list[Tensor] = []
    for chunk in chunks(tensors, AT_ONCE):
        names += chunk
        sums.append(tensor_checksums(list(chunk.values())))
    return dict(zip(names, as_numbers(sums), strict=True))


def _bits(tensor: Tensor) -> Tensor:
    """A tensor's bits as whole numbers, eight bytes each where that comes out even."""
    bits = tensor.detach().contiguous().flatten()
    bits = bits.view(_BITS[bits.element_size()])
    in_one = 8 // bits.element_size()
    if bits.numel() % in_one == 0:
        is_off = bits.data_ptr() % 8 or bits.storage_offset() % in_one  # of nothing, only the second tells
        bits = (bits.clone() if is_off else bits).view(torch.int64)
    return bits


def _is_even(tensor: Tensor) -> bool:
    """Whether it can be read eight bytes at a time where it lies; to look is quicker than to make a view of it."""
    return tensor.is_contiguous() and not (tensor.nbytes | tensor.data_ptr()) % 8


def _shift(count: int) -> int:
    """What _SHIFT adds to a sum over so many places."""
    return _wrapped(_SHIFT * (count * (count - 1) // 2 * _STEP + count * _START))


@lru_cache
def _kernel(device: torch.device) -> Callable[[Sequence[Tensor], Sequence[int], int, int], Tensor] | None:
    """All of it in one pass over the bits, where Triton works; the operations above take a dozen a tensor."""
    try:
        from lgrpo.functional.checksum_kernel import weighted_sums

        weighted_sums([torch.zeros(1, dtype=torch.int64, device=device)], [8], _STEP, _START)
    except Exception as error:  # what Triton misses, a compiler say, shows when it is first used
        if not isinstance(error, ImportError):
            warnings.warn(f"syncs take a little longer, since Triton does not work here: {error}", stacklevel=2)
        return None
    return weighted_sums


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


def as_numbers(checksums: Sequence[Tensor]) -> list[int]:
    """Checksums as numbers, fetched from their device all at once: each time would wait for it."""
    return [number & 0xFFFFFFFFFFFFFFFF for number in joined(checksums).tolist()]


def combined_checksum(checksums: Mapping[str, int]) -> str:
    """One short word for a whole model.

    >>> combined_checksum({"a": 1, "b": 2}) == combined_checksum({"b": 2, "a": 1})
    True
    """
    text = "\n".join(f"{name} {checksums[name]:016x}" for name in sorted(checksums))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
