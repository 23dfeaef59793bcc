"""Checkpoints on disk: there whole or not at all, and the newest one that is whole."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import warnings
import zipfile
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

PART = ".part"
"""Behind the name of a checkpoint that is being written."""
SIZES = "sizes.json"
META = "meta.pt"
"""What of a sharded checkpoint is not spread: counters, rollouts, the engine's weights."""


class WholeCheckpointIO(TorchCheckpointIO):
    """Writes beside the target, to the disk itself, and moves the file into place.

    Where that fails (the disk is full, the folder read-only) a warning says so and training goes on: what is there
    stays, also what this checkpoint was to replace.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_failures = 0
        self.failed: Path | None = None
        """The file that could not be written last, until one could."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        if "://" in str(path) or storage_options is not None:  # not on a disk of this machine
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        path = Path(path)
        part = path.with_name(path.name + PART)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
            flush_folder(path.parent)
        except (OSError, RuntimeError) as error:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            if isinstance(error, RuntimeError) and "inline_container" not in str(error):
                raise  # else torch's way of saying that bytes did not get to the disk
            self.num_failures += 1
            self.failed = path
            warnings.warn(
                f"no checkpoint could be written to {path} ({_reason(error)}); training goes on, and earlier "
                "checkpoints are kept",
                stacklevel=2,
            )
        else:
            self.failed = None

    def load_checkpoint(
        self, path: str | Path, map_location: Any = lambda storage, loc: storage, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Without executing what it holds, unless that is asked for."""
        return super().load_checkpoint(path, map_location, True if weights_only is None else weights_only)

    def remove_checkpoint(self, path: str | Path) -> None:
        if self.failed is None:
            super().remove_checkpoint(path)


def write_whole(trainer: L.Trainer) -> None:
    """Has a Trainer write its checkpoints so, unless the user gave it a way of their own."""
    strategy = trainer.strategy
    if type(strategy.checkpoint_io) is TorchCheckpointIO:
        strategy.checkpoint_io = WholeCheckpointIO()
    if not hasattr(strategy, "_save_distributed_checkpoint") and not hasattr(strategy, "_state_dict_type"):
        return
    if getattr(strategy.save_checkpoint, "is_whole", False):
        return
    save = strategy.save_checkpoint

    def save_beside(checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Sharded: every rank writes into a folder beside the target, which is moved when all are done."""
        part = f"{filepath}{PART}"
        if strategy.is_global_zero:
            for left in (part, f"{filepath}.old{PART}"):
                shutil.rmtree(left, ignore_errors=True)
        strategy.barrier()
        save(checkpoint, part, storage_options)
        strategy.barrier()
        if strategy.is_global_zero and os.path.exists(part):
            target, old = Path(filepath), Path(f"{filepath}.old{PART}")
            if Path(part).is_dir():
                write_sizes(Path(part))
                if target.exists():  # to remove a folder takes long: until the new one is there, it stays
                    os.replace(target, old)
            os.replace(part, target)
            flush_folder(Path(filepath).parent)
            shutil.rmtree(old) if old.is_dir() else old.unlink(missing_ok=True)
        strategy.barrier()

    save_beside.is_whole = True  # type: ignore[attr-defined]
    strategy.save_checkpoint = save_beside  # type: ignore[method-assign]


def is_whole(path: Path) -> bool:
    """Whether every byte of a checkpoint is there and as it was written."""
    if path.is_dir():
        return has_sizes(path)
    try:
        with zipfile.ZipFile(path) as file:
            return file.testzip() is None  # reads it all, and compares checksums
    except (OSError, zipfile.BadZipFile, EOFError, RuntimeError, ValueError):
        return False


def write_sizes(folder: Path) -> None:
    """Notes how large each file of a sharded checkpoint is."""
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    (folder / SIZES).write_text(json.dumps(sizes), encoding="utf-8")


def has_sizes(folder: Path) -> bool:
    """Whether every file of a sharded checkpoint is as large as it was."""
    try:
        sizes = json.loads((folder / SIZES).read_text(encoding="utf-8"))
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


def damage(path: Path) -> str:
    """What is wrong with a checkpoint that is not whole."""
    if not path.is_dir():
        return "it was cut short, or its bytes are not those that were written"
    try:
        sizes = json.loads((path / SIZES).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return f"there is no {SIZES}, which is written last"
    lost = [name for name in sizes if not (path / name).exists()]
    if lost:
        return f"{', '.join(lost)} of its {len(sizes)} files are missing"
    return f"{', '.join(n for n, size in sizes.items() if (path / n).stat().st_size != size)} are cut short"


def newest_checkpoint(folder: Path) -> Path:
    """The newest checkpoint of a folder that is whole. Newer ones that are not are named in a warning."""
    paths = sorted(folder.glob("*.ckpt"), key=lambda path: (path.stat().st_mtime_ns, path.name.startswith("last")))
    damaged: list[Path] = []
    for path in reversed(paths):
        if is_whole(path):
            if damaged:
                names = ", ".join(p.name for p in damaged)
                warnings.warn(
                    f"damaged, so not used: {names} in {folder}. Going on from {path.name}, the newest that is whole",
                    stacklevel=2,
                )
            return path
        damaged.append(path)
    if damaged:
        raise FileNotFoundError(f"none of the {len(damaged)} checkpoints in {folder} is whole")
    raise FileNotFoundError(f"there is no checkpoint in {folder} to go on from")


def sweep_parts(folder: Path) -> None:
    """Removes what a process that was killed had begun to write."""
    for path in folder.glob(f"*{PART}"):
        with contextlib.suppress(OSError):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def flush_folder(folder: Path) -> None:
    """Has the disk remember a file's new name, where the system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _reason(error: BaseException) -> str:
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__context__
    return cause.strerror or str(cause) if cause is not None else "the disk did not take it"


def consolidate(folder: Path, path: Path) -> None:
    """A sharded checkpoint, which is a folder, as one file, as a run that is not sharded would have written it."""
    if not (folder / META).is_file():
        raise ValueError(f"{folder} is not a sharded checkpoint: that is a folder with {META} and a part for each rank")
    if not is_whole(folder):
        raise ValueError(f"{folder} is damaged: {damage(folder)}")
    if path.exists():
        raise ValueError(f"{path} exists already, and nothing is overwritten")
    checkpoint, spread = read_sharded(folder)
    checkpoint["state_dict"] = spread.pop("state_dict")
    checkpoint["optimizer_states"] = [by_number(spread[name]) for name in sorted(spread)]
    writer = WholeCheckpointIO()
    writer.save_checkpoint(checkpoint, path)
    if writer.failed is not None:
        raise OSError(f"{path} could not be written")


def read_sharded(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What of a sharded checkpoint is not spread over files, and what is, put together. Nothing in it is executed."""
    with tempfile.TemporaryDirectory() as place:
        whole = Path(place) / "whole.pt"
        dcp_to_torch_save(folder, whole)
        spread = torch.load(whole, map_location="cpu", weights_only=True)
    if "model" in spread:  # so FSDPStrategy calls it
        spread["state_dict"] = spread.pop("model")
    return torch.load(folder / META, map_location="cpu", weights_only=True), spread


def by_number(optimizer: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state under the numbers of its parameters, where it was under their names.

    >>> by_number({"state": {"b": 5}, "param_groups": [{"lr": 1, "params": ["a", "b"]}]})
    {'state': {1: 5}, 'param_groups': [{'lr': 1, 'params': [0, 1]}]}
    """
    names = [name for group in optimizer["param_groups"] for name in group["params"]]
    number = {name: count for count, name in enumerate(names)}
    return {
        "state": {number[name]: state for name, state in optimizer.get("state", {}).items()},
        "param_groups": [
            group | {"params": [number[n] for n in group["params"]]} for group in optimizer["param_groups"]
        ],
    }
