"""Chunks of named tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

CHUNK_BYTES = 2**28
"""Bytes a GPU processes together: tensor by tensor, launching a kernel would take longer than running it."""


def chunks(
    tensors: Iterable[tuple[str, Tensor]], num_bytes: int = 2**30, dtype: torch.dtype | None = None
) -> Iterator[dict[str, Tensor]]:
    """Yield named tensors in chunks of about ``num_bytes``, counted in ``dtype`` if given.

    >>> import torch
    >>> [list(chunk) for chunk in chunks([("a", torch.zeros(2)), ("b", torch.zeros(2)), ("c", torch.zeros(2))], 16)]
    [['a', 'b'], ['c']]
    """
    chunk: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        chunk[name] = tensor
        size += tensor.numel() * (dtype or tensor.dtype).itemsize
        del tensor  # only the chunk keeps the tensor alive
        if size >= num_bytes:
            yield chunk
            chunk, size = {}, 0
    if chunk:
        yield chunk


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors of one dimension on the device of the first.

    >>> import torch
    >>> joined([torch.tensor([1, 2]), torch.tensor([3])]).tolist()
    [1, 2, 3]
    """
    return torch.cat([tensor.to(tensors[0].device) for tensor in tensors]) if tensors else torch.empty(0)
