"""Triton kernel of the checksums: one pass over the tensors. Triton comes with torch for CUDA."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_READERS = 128
"""Largest number of programs that read a tensor, in turn a block each."""


def weighted_sums(tensors: Sequence[Tensor], words: Sequence[int], step: int, start: int) -> Tensor:
    """Return the sum of bits · (index · step + start) of each tensor, upper half folded into the lower, modulo 2**64.

    ``words`` are the sizes in bytes of the integers each tensor is read as. All tensors of one size share a kernel
    launch, which takes longer than reading a tensor.
    """
    device = tensors[0].device
    totals = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    with torch.cuda.device(device):
        for size in dict.fromkeys(words):
            indices = [index for index, word in enumerate(words) if word == size]
            rows = [(index, tensors[index].data_ptr(), tensors[index].nbytes // size) for index in indices]
            readers = max(1, min(_READERS, triton.cdiv(max(count for _, _, count in rows), _BLOCK)))
            table = torch.tensor(rows).to(device, non_blocking=True)
            _add_weighted[(len(rows), readers)](table, totals, _WORDS[size], step, start, _BLOCK)
    return totals


_WORDS = {1: tl.uint8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


@triton.jit
def _add_weighted(table, totals, word: tl.constexpr, step: tl.constexpr, start: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = table + 3 * tl.program_id(0)
    bits, count = tl.load(row + 1).to(tl.pointer_type(word)), tl.load(row + 2)
    total = tl.zeros((block,), dtype=tl.int64)
    first = tl.program_id(1).to(tl.int64) * block
    for begin in range(first, count, tl.num_programs(1).to(tl.int64) * block):
        indices = begin + tl.arange(0, block).to(tl.int64)
        piece = tl.load(bits + indices, mask=indices < count, other=0).to(tl.int64)
        total += ((piece >> 31) ^ piece) * (indices * step + start)
    if first < count:
        tl.atomic_add(totals + tl.load(row), tl.sum(total))  # integers: the order does not matter
