"""Weights as safetensors files in a folder."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from lgrpo.functional import chunks


def write_folder(folder: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write tensors as files of about a gigabyte, each atomically, and delete all other safetensors files."""
    names = set()
    for count, chunk in enumerate(chunks(tensors)):
        path = folder / f"model-{count:05d}.safetensors"
        save_file({name: tensor.cpu().contiguous() for name, tensor in chunk.items()}, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)
        names.add(path.name)
    for path in folder.glob("*.safetensors"):
        if path.name not in names:
            path.unlink()


def read_folder(folder: Path) -> dict[str, Tensor]:
    """Return every tensor of a folder's safetensors files."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def shared_memory(num_bytes: int = 0) -> str | None:
    """Return the folder of shared memory if it has more free bytes than that, else None; containers may have few."""
    has_space = os.path.isdir("/dev/shm") and shutil.disk_usage("/dev/shm").free > num_bytes
    return "/dev/shm" if has_space else None


@contextmanager
def temporary_folder(num_bytes: int = 0) -> Iterator[Path]:
    """Create a folder for so many bytes, in shared memory if possible, and delete it afterwards."""
    with tempfile.TemporaryDirectory(prefix="lgrpo-weights-", dir=shared_memory(num_bytes)) as folder:
        yield Path(folder)
