"""Weights on their way into the processes of a pool, some tensors at a time."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

Contents: TypeAlias = "list[tuple[str, torch.dtype, torch.Size]]"
"""Names, types and shapes of tensors that lie one after another in one piece of memory."""
Parcel: TypeAlias = "Path | tuple[int, int, Contents | None, Any]"
"""Some tensors, for one other process: a file; or the number of a parcel, its tray, what is in it, and where on the GPU
the tray is found, these two where they are news."""
Known: TypeAlias = "dict[tuple[str, int], int]"
"""What another process has been told of trays and parcels."""

_DEVICE = 6
"""Where among what torch needs to find a tensor again the number of its GPU stands."""
_TRAYS = 3
"""One is filled, one is read, and of the one before that some tensors may still be waiting."""


@dataclass(kw_only=True, slots=True)
class Tray:
    """One that is filled."""

    number: int
    """Of the parcel that is in it."""
    place: int
    """Which of the trays it is."""
    memory: Tensor
    contents: Contents
    tensors: dict[str, Tensor]
    """In that memory."""
    serials: tuple[int, int]
    """Of the memory and of the contents: others have others."""

    def packed(self, known: Known) -> Parcel:
        """For another process, which then knows more."""
        memory, contents = self.serials
        is_known = known.get(("memory", self.place)) == memory, known.get(("contents", self.number)) == contents
        known |= {("memory", self.place): memory, ("contents", self.number): contents}
        where = None if is_known[0] else reduce_tensor(self.memory)
        return self.number, self.place, None if is_known[1] else self.contents, where


class Trays:
    """Memory of the trainer's GPU that weights go through on their way to other processes.

    It is kept from one sync to the next: to get some, and to open it in another process, takes longer than to fill it.
    """

    def __init__(self) -> None:
        self._memory: dict[int, tuple[int, Tensor]] = {}
        self._last: dict[int, Tray] = {}
        """By the number of the parcel: a sync is mostly like the one before."""
        self._serials = count()
        self._is_lost = False

    def fill(self, number: int, tensors: dict[str, Tensor], dtype: torch.dtype | None) -> Tray:
        """Tensors in one of the trays, in turn, in a type of its own.

        >>> tensors = {"a": torch.ones(3, dtype=torch.bfloat16), "b": torch.tensor([[1.0, 2.0]])}
        >>> tray = Trays().fill(4, tensors, None)
        >>> tray.place, tray.memory.numel()
        (1, 32)
        >>> tray.tensors["b"]
        tensor([[1., 2.]])
        """
        contents = [(name, dtype or tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
        with torch.inference_mode(False), torch.no_grad():  # a validation has inference mode, which leaves marks
            tray = self._laid(number, contents, next(iter(tensors.values())).device)
            torch._foreach_copy_(list(tray.tensors.values()), list(tensors.values()))
        return tray

    def _laid(self, number: int, contents: Contents, device: torch.device) -> Tray:
        place = number % _TRAYS
        last = self._last.pop(number, None)
        size = sum(_room(shape.numel() * dtype.itemsize) for _, dtype, shape in contents)
        if place not in self._memory or not _fits(self._memory[place][1], size, device):
            self._memory.pop(place, None)  # before there is another
            last = None  # which lay in that
            self._last = {other: tray for other, tray in self._last.items() if tray.place != place}
            self._memory[place] = next(self._serials), torch.empty(size, dtype=torch.uint8, device=device)
        serial, memory = self._memory[place]
        if last is not None and last.contents == contents:
            self._last[number] = last
            return last
        self._last[number] = Tray(
            number=number,
            place=place,
            memory=memory,
            contents=contents,
            tensors=in_a_row(contents, memory),
            serials=(serial, next(self._serials)),
        )
        return self._last[number]

    def lose(self) -> None:
        """A process has ended without letting go of them: torch would never give their memory back."""
        self._is_lost = True

    def clear(self) -> None:
        """Gives the memory back that no other process has open. What would be lost stays, to be filled again."""
        if self._memory and not self._is_lost:
            self._memory.clear()
            self._last.clear()
            torch.cuda.ipc_collect()


def _fits(memory: Tensor, size: int, device: torch.device) -> bool:
    return memory.numel() >= size and memory.device == device


class OpenTrays:
    """The trays as another process sees them."""

    def __init__(self) -> None:
        self._memory: dict[int, Tensor] = {}
        self._contents: dict[int, Contents] = {}
        self._last: dict[int, dict[str, Tensor]] = {}

    def unpacked(self, parcel: Parcel) -> dict[str, Tensor]:
        """The tensors; those of a tray in its memory."""
        if isinstance(parcel, Path):
            return load_file(parcel)
        number, place, contents, where = parcel
        if where is not None:
            rebuild, arguments = where
            self._memory.pop(place, None)  # before there is another
            self._last = {other: tensors for other, tensors in self._last.items() if other % _TRAYS != place}
            self._memory[place] = rebuild(*_on_own_device(arguments))
        if contents is not None:
            self._contents[number] = contents
            self._last.pop(number, None)
        if number not in self._last:
            self._last[number] = in_a_row(self._contents[number], self._memory[place])
        return self._last[number]

    def finish(self) -> None:
        """Waits until all that was to be read from the trays has been: the trainer will fill them again."""
        if self._memory:
            torch.cuda.synchronize()

    def clear(self) -> None:
        """Lets go of the trainer's memory: it is not given back before."""
        self._last.clear()
        self._memory.clear()


def in_a_row(contents: Contents, memory: Tensor) -> dict[str, Tensor]:
    """Tensors in the memory they were put in."""
    tensors, start = {}, 0
    for name, dtype, shape in contents:
        size = shape.numel() * dtype.itemsize
        tensors[name] = memory[start : start + size].view(dtype).view(shape)
        start += _room(size)
    return tensors


def _room(size: int) -> int:
    """Bytes that so many take up, so that what follows begins where any type may."""
    return size + -size % 16


def in_a_file(tensors: dict[str, Tensor], path: Path) -> Path:
    """Tensors in shared memory, or on a disk."""
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, path)
    return path


def _on_own_device(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The trainer may count GPUs otherwise: a member sees one only, the same."""
    return (*arguments[:_DEVICE], torch.cuda.current_device(), *arguments[_DEVICE + 1 :])
