"""The checksum of a tensor on a GPU, in one pass. Needs Triton, which comes with torch for CUDA."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


def weighted_sum(bits: Tensor, step: int, start: int) -> Tensor:
    """The sum of bits · (place · step + start), each with its upper half folded into the lower, modulo 2**64."""
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    with torch.cuda.device_of(bits):
        _weigh[(triton.cdiv(bits.numel(), _BLOCK) or 1,)](bits, total, bits.numel(), step, start, _BLOCK)
    return total


@triton.jit(do_not_specialize=["count"])
def _weigh(bits, total, count, step: tl.constexpr, start: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    is_inside = places < count
    piece = tl.load(bits + places, mask=is_inside, other=0).to(tl.int64)
    tl.atomic_add(total, tl.sum(((piece >> 31) ^ piece) * (places * step + start)))  # in any order: whole numbers
