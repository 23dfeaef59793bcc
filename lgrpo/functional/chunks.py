"""Many tensors, some of them at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

AT_ONCE = 2**28
"""Bytes a GPU works on together: with a tensor at a time, to start takes longer than to finish."""


def chunks(
    tensors: Iterable[tuple[str, Tensor]], num_bytes: int = 2**30, dtype: torch.dtype | None = None
) -> Iterator[dict[str, Tensor]]:
    """Named tensors, about a gigabyte at a time: never a second copy of the whole. With a ``dtype``, bytes as of that.

    >>> import torch
    >>> [list(chunk) for chunk in chunks([("a", torch.zeros(2)), ("b", torch.zeros(2)), ("c", torch.zeros(2))], 16)]
    [['a', 'b'], ['c']]
    """
    chunk: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        chunk[name] = tensor
        size += tensor.numel() * (dtype or tensor.dtype).itemsize
        del tensor  # whoever takes the chunk decides how long it stays
        if size >= num_bytes:
            yield chunk
            chunk, size = {}, 0
    if chunk:
        yield chunk


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors of one dimension as one, where the first of them is.

    >>> import torch
    >>> joined([torch.tensor([1, 2]), torch.tensor([3])]).tolist()
    [1, 2, 3]
    """
    return torch.cat([tensor.to(tensors[0].device) for tensor in tensors]) if tensors else torch.empty(0)
