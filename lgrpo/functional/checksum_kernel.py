"""Checksums of tensors on a GPU, in one pass. Needs Triton, which comes with torch for CUDA."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_READERS = 128
"""At most so many read a tensor, each a block of it in turn."""


def weighted_sums(tensors: Sequence[Tensor], words: Sequence[int], step: int, start: int) -> Tensor:
    """Of each, the sum of bits · (place · step + start), with their upper half folded into the lower, modulo 2**64.

    The bits are numbers of ``words`` bytes. A kernel takes longer to start than to read a tensor: so there is one for
    all whose numbers have the same size.
    """
    device = tensors[0].device
    totals = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    with torch.cuda.device(device):
        for size in dict.fromkeys(words):
            places = [place for place, own in enumerate(words) if own == size]
            rows = [(place, tensors[place].data_ptr(), tensors[place].nbytes // size) for place in places]
            readers = max(1, min(_READERS, triton.cdiv(max(count for _, _, count in rows), _BLOCK)))
            table = torch.tensor(rows).to(device, non_blocking=True)
            _weigh[(len(rows), readers)](table, totals, _WORDS[size], step, start, _BLOCK)
    return totals


_WORDS = {1: tl.uint8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


@triton.jit
def _weigh(table, totals, word: tl.constexpr, step: tl.constexpr, start: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = table + 3 * tl.program_id(0)
    bits, count = tl.load(row + 1).to(tl.pointer_type(word)), tl.load(row + 2)
    total = tl.zeros((block,), dtype=tl.int64)
    first = tl.program_id(1).to(tl.int64) * block
    for begin in range(first, count, tl.num_programs(1).to(tl.int64) * block):
        places = begin + tl.arange(0, block).to(tl.int64)
        piece = tl.load(bits + places, mask=places < count, other=0).to(tl.int64)
        total += ((piece >> 31) ^ piece) * (places * step + start)
    if first < count:
        tl.atomic_add(totals + tl.load(row), tl.sum(total))  # in any order: whole numbers
