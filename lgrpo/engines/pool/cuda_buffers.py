"""Chunks of weights that are sent to the processes of a pool: through shared GPU memory, or as files."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

ChunkLayout: TypeAlias = "list[tuple[str, torch.dtype, torch.Size]]"
"""Name, type and shape of each tensor of a chunk, in the order of their memory."""
ReceiverCache: TypeAlias = "dict[tuple[str, int], int]"
"""Ids of the buffers and layouts that a receiving process already has."""

_DEVICE_ARGUMENT = 6
"""Index of the GPU's number among the arguments with which torch rebuilds a CUDA tensor."""
_NUM_BUFFERS = 3
"""One buffer is filled, one is read, and tensors of the one before may still be in use."""


class StagedMessage(NamedTuple):
    """A chunk in GPU memory, as it is sent to a process. ``layout`` and ``handle`` are None if the process has them."""

    number: int
    layout: ChunkLayout | None
    handle: Any
    """How torch rebuilds the buffer in another process."""


ChunkMessage: TypeAlias = Path | StagedMessage
"""A chunk as it is sent to a process: a file, or a buffer in GPU memory."""


@dataclass(kw_only=True, slots=True)
class StagedChunk:
    """A chunk of weights in a buffer."""

    number: int
    """Index of the chunk in the sync."""
    memory: Tensor
    layout: ChunkLayout
    tensors: dict[str, Tensor]
    """Views of the buffer."""
    memory_id: int
    layout_id: int

    def message(self, cache: ReceiverCache) -> StagedMessage:
        """Return the message for a process, without what it already has, and update its cache."""
        memory_key, layout_key = ("memory", slot_of(self.number)), ("layout", self.number)
        has_memory, has_layout = cache.get(memory_key) == self.memory_id, cache.get(layout_key) == self.layout_id
        cache |= {memory_key: self.memory_id, layout_key: self.layout_id}
        handle = None if has_memory else reduce_tensor(self.memory)
        return StagedMessage(self.number, None if has_layout else self.layout, handle)


class StagingBuffers:
    """GPU memory of the trainer through which weights are sent to other processes.

    The buffers are kept between syncs, because allocating and mapping them takes longer than filling them.
    """

    def __init__(self) -> None:
        self._memory: dict[int, tuple[int, Tensor]] = {}
        """Id and memory of each slot."""
        self._chunks: dict[int, StagedChunk] = {}
        """Chunks of the last sync by number; the next sync usually has the same layout."""
        self._ids = count()
        self._is_leaked = False

    def fill(self, number: int, tensors: dict[str, Tensor], dtype: torch.dtype | None) -> StagedChunk:
        """Copy tensors into the buffer whose turn it is, cast to ``dtype`` if given.

        >>> tensors = {"a": torch.ones(3, dtype=torch.bfloat16), "b": torch.tensor([[1.0, 2.0]])}
        >>> chunk = StagingBuffers().fill(4, tensors, None)
        >>> chunk.memory.numel()
        32
        >>> chunk.tensors["b"]
        tensor([[1., 2.]])
        """
        layout = [(name, dtype or tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
        with torch.inference_mode(False), torch.no_grad():  # a validation would create inference tensors
            chunk = self._allocate(number, layout, next(iter(tensors.values())).device)
            torch._foreach_copy_(list(chunk.tensors.values()), list(tensors.values()))
        return chunk

    def _allocate(self, number: int, layout: ChunkLayout, device: torch.device) -> StagedChunk:
        slot = slot_of(number)
        last = self._chunks.pop(number, None)
        size = sum(_aligned(shape.numel() * dtype.itemsize) for _, dtype, shape in layout)
        memory_id, memory = self._memory.get(slot, (-1, None))
        if memory is None or memory.numel() < size or memory.device != device:
            self._memory.pop(slot, None)
            last = memory = None  # release it before the next allocation
            self._chunks = {other: chunk for other, chunk in self._chunks.items() if slot_of(other) != slot}
            memory_id, memory = next(self._ids), torch.empty(size, dtype=torch.uint8, device=device)
            self._memory[slot] = memory_id, memory
        if last is None or last.layout != layout:
            last = StagedChunk(
                number=number,
                memory=memory,
                layout=layout,
                tensors=views_of(memory, layout),
                memory_id=memory_id,
                layout_id=next(self._ids),
            )
        self._chunks[number] = last
        return last

    def mark_leaked(self) -> None:
        """Note that a process was killed while it had mapped the buffers, so that torch can never release them."""
        self._is_leaked = True

    def clear(self) -> None:
        """Release the buffers, unless they are leaked: then they are kept and filled again."""
        if self._memory and not self._is_leaked:
            self._memory.clear()
            self._chunks.clear()
            torch.cuda.ipc_collect()


class MappedBuffers:
    """The trainer's buffers as a receiving process sees them."""

    def __init__(self) -> None:
        self._memory: dict[int, Tensor] = {}
        self._layouts: dict[int, ChunkLayout] = {}
        self._tensors: dict[int, dict[str, Tensor]] = {}

    def tensors_of(self, message: ChunkMessage) -> dict[str, Tensor]:
        """Return the tensors of a chunk; those of a buffer as views of it."""
        if isinstance(message, Path):
            return load_file(message)
        number, layout, handle = message
        slot = slot_of(number)
        if handle is not None:
            rebuild, arguments = handle
            self._memory.pop(slot, None)  # release it before the next one is mapped
            self._tensors = {other: views for other, views in self._tensors.items() if slot_of(other) != slot}
            self._memory[slot] = rebuild(*_with_local_device(arguments))
        if layout is not None:
            self._layouts[number] = layout
            self._tensors.pop(number, None)
        if number not in self._tensors:
            self._tensors[number] = views_of(self._memory[slot], self._layouts[number])
        return self._tensors[number]

    def synchronize(self) -> None:
        """Wait until all pending reads of the buffers are done, because the trainer will fill them again."""
        if self._memory:
            torch.cuda.synchronize()

    def clear(self) -> None:
        """Unmap the trainer's memory, which is not released before."""
        self._tensors.clear()
        self._memory.clear()


def slot_of(number: int) -> int:
    """Return the index of the buffer that the chunk with this number uses."""
    return number % _NUM_BUFFERS


def views_of(memory: Tensor, layout: ChunkLayout) -> dict[str, Tensor]:
    """Return views of a buffer according to a layout."""
    tensors, start = {}, 0
    for name, dtype, shape in layout:
        size = shape.numel() * dtype.itemsize
        tensors[name] = memory[start : start + size].view(dtype).view(shape)
        start += _aligned(size)
    return tensors


def _aligned(size: int) -> int:
    """Return a number of bytes, rounded up so that a tensor of any type can follow."""
    return size + -size % 16


def write_file(tensors: dict[str, Tensor], path: Path) -> Path:
    """Write tensors to a file."""
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, path)
    return path


def _with_local_device(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Replace the number of the GPU: the trainer may see several, a worker sees only the shared one."""
    return (*arguments[:_DEVICE_ARGUMENT], torch.cuda.current_device(), *arguments[_DEVICE_ARGUMENT + 1 :])
