"""Copies of nested containers with tensors in host memory, as a checkpoint has them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SHARE = 0.5
"""Largest share of the free host memory that a copy may take."""


def in_host_memory(value: Any, copies: dict[Any, torch.UntypedStorage] | None = None) -> Any:
    """Return a copy that shares nothing with the original, its tensors on the CPU.

    Tensors that share memory, such as tied weights, share it in the copy too, so that the file has them once.

    >>> weight = torch.zeros(4)
    >>> copied = in_host_memory({"step": [3], "embed": weight, "head": weight.view(2, 2)})
    >>> _ = weight.add_(1)
    >>> copied["embed"].tolist(), copied["embed"].data_ptr() == copied["head"].data_ptr()
    ([0.0, 0.0, 0.0, 0.0], True)
    """
    copies = {} if copies is None else copies
    if isinstance(value, Tensor):
        return _tensor_in_host_memory(value, copies)
    if isinstance(value, dict):
        copied = copy.copy(value)  # keeps the class
        for key, item in value.items():
            copied[key] = in_host_memory(item, copies)
        return copied
    if type(value) in (list, tuple):
        return type(value)(in_host_memory(item, copies) for item in value)
    return copy.deepcopy(value)


def fits_in_host_memory(value: Any) -> bool:
    """Return whether ``in_host_memory`` takes at most ``SHARE`` of the free memory; True if that is not known."""
    free = _free_bytes()
    storages = {_key(tensor): tensor.untyped_storage().nbytes() for tensor in _tensors(value)}
    return free is None or sum(storages.values()) <= SHARE * free


def _tensor_in_host_memory(tensor: Tensor, copies: dict[Any, torch.UntypedStorage]) -> Tensor:
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        return tensor.detach().to("cpu", copy=True)
    key = _key(tensor)
    if key not in copies:
        storage = tensor.untyped_storage()
        copies[key] = storage.clone() if tensor.device.type == "cpu" else storage.cpu()
    copied = torch.empty(0, dtype=tensor.dtype)
    copied.set_(copies[key], tensor.storage_offset(), tensor.size(), tensor.stride())
    return copied


def _key(tensor: Tensor) -> tuple[torch.device, int, int]:
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.layout is torch.strided:
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _free_bytes() -> int | None:
    """Return the memory that a process can take without swapping, if the system states it."""
    lines = _read(Path("/proc/meminfo")).splitlines()
    free = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return min([*free, *_free_in_groups(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))], default=None)


def _free_in_groups(own: Path, root: Path) -> Iterator[int]:
    """Yield what is left of the limit of each control group of this process, such as a container or a job."""
    for line in _read(own).splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top = root if controllers == "" else root / controllers
        names = ("memory.max", "memory.current") if controllers == "" else _OLD_NAMES
        group = top / name.lstrip("/")
        for folder in (group, *group.parents):
            limit, used = (_read(folder / file).strip() for file in names)
            if limit.isdecimal() and used.isdecimal():
                yield max(0, int(limit) - int(used))
            if folder == top:
                break


_OLD_NAMES = "memory.limit_in_bytes", "memory.usage_in_bytes"
"""Files of version 1 of control groups."""


def _read(path: Path) -> str:
    """Return the text of a file; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
