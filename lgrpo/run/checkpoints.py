"""Checkpoints on disk: written atomically, checked for damage, and the newest of a folder."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import time
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, Strategy
from lightning.pytorch.utilities import rank_zero_info

from lgrpo.run.sizes import format_bytes

PART = ".part"
"""Suffix of a checkpoint that is being written."""
META = "meta.pt"
"""File with the parts of a sharded checkpoint that are not sharded: counters, rollouts, the engine's weights."""
SIZES = "sizes.json"
"""File with the sizes of the other files of a sharded checkpoint."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its target, flushes it to disk, and renames it. Checks a checkpoint before loading it.

    If that fails (the disk is full, the folder read-only), training continues with a warning, and no earlier checkpoint
    is removed. The one that this checkpoint should have replaced stands in for it: it is removed when this checkpoint
    would be, or is written after all, so the number of checkpoints stays the configured one.

    A second checkpoint of the same moment, usually ``last.ckpt``, is a hard link to the first: one copy on disk. Either
    can be removed without the other.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_failures = 0
        self.failed: Path | None = None
        """Target of the last write if it failed, otherwise None."""
        self._stand_ins: dict[Path, set[Path]] = {}
        """Checkpoints that were kept because the write of another one failed, by the path of that one."""
        self._written: tuple[Any, Path] | None = None
        """Moment and path of the last checkpoint that was written."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        if "://" in str(path) or storage_options is not None:  # not on a local disk
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        self.write(checkpoint, Path(path), moment(checkpoint))

    def write(self, checkpoint: dict[str, Any], path: Path, now: Any, waited: float | None = None) -> None:
        """Write a checkpoint of the moment ``now``, for whose copy training ``waited`` if there is one."""
        part = path.with_name(path.name + PART)
        written, self._written = self._written, None
        started, is_link = time.perf_counter(), False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            is_link = written is not None and written[0] == now and _linked(written[1], part)
            if not is_link:
                with part.open("wb") as file:
                    torch.save(checkpoint, file)
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(part, path)
            part.unlink(missing_ok=True)  # a link is not renamed to another link to the same file
            flush_folder(path.parent)
        except (OSError, RuntimeError) as error:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            if isinstance(error, RuntimeError) and "inline_container" not in str(error):
                raise  # torch reports failed writes as RuntimeErrors of its inline_container
            self.num_failures += 1
            self.failed = path
            self.inform(
                warnings.warn,
                f"no checkpoint could be written to {path} ({_reason(error)}); training continues, and earlier "
                "checkpoints are kept",
            )
        else:
            self.failed, self._written = None, (now, path)
            if not is_link:
                self.inform(rank_zero_info, written_line(path, time.perf_counter() - started, waited))
            for stand_in in self._stand_ins.pop(path, set()) - {path}:
                super().remove_checkpoint(stand_in)

    def inform(self, tell: Callable[[str], None], text: str) -> None:
        """Call a function, such as ``warnings.warn``, with a message."""
        tell(text)

    def wait(self) -> None:
        """Return when the checkpoints that were saved are on disk: at once."""

    def load_checkpoint(
        self, path: str | Path, map_location: Any = lambda storage, loc: storage, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint; raise if it is damaged. No code in it is executed unless ``weights_only`` is False."""
        if Path(path).is_file() and (found := damage(Path(path))):
            raise ValueError(f"the checkpoint {path} is damaged: {found}")
        return super().load_checkpoint(path, map_location, True if weights_only is None else weights_only)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint and those that stand in for it, unless the last write failed: then keep them."""
        if "://" in str(path):  # not on a local disk
            super().remove_checkpoint(path)
            return
        paths = {Path(path), *self._stand_ins.pop(Path(path), set())}
        if self.failed is not None:
            self._stand_ins.setdefault(self.failed, set()).update(paths)
            return
        for each in paths:
            super().remove_checkpoint(each)


def moment(checkpoint: dict[str, Any]) -> Any:
    """Return what two checkpoints have in common only if nothing was trained or validated between them."""
    weights = checkpoint.get("state_dict", {}).values()
    tensors = [(t.data_ptr(), t._version) for t in weights if isinstance(t, torch.Tensor) and not t.is_inference()]
    queues = [
        (len(rank["schedule"]["queue"]), rank["schedule"]["last_started"])
        for part in checkpoint.values()
        if isinstance(part, dict)
        for rank in part.get("ranks", [])
    ]
    try:
        callbacks: Any = pickle.dumps(checkpoint.get("callbacks"))
    except Exception:
        callbacks = object()  # equal to no other
    return sorted(checkpoint), checkpoint.get("global_step"), repr(checkpoint.get("loops")), tensors, queues, callbacks


def written_line(path: Path, seconds: float, waited: float | None = None) -> str:
    """Return a line for the log: a checkpoint with its size, the time to write it, and how long training waited."""
    files = path.iterdir() if path.is_dir() else [path]
    size = format_bytes(sum(file.stat().st_size for file in files))
    return f"Wrote {path}: {size} in {seconds:.1f} s{'' if waited is None else f'; training waited {waited:.1f} s'}."


def _linked(source: Path, target: Path) -> bool:
    """Make a hard link; return False if the source is gone or the file system has no links."""
    try:
        target.unlink(missing_ok=True)
        os.link(source, target)
    except OSError:
        return False
    return True


def gather_ranks(trainer: L.Trainer, state: Any) -> list[Any]:
    """Return the states of all ranks. All ranks must call it."""
    states = [state] * trainer.world_size
    if trainer.world_size > 1:
        torch.distributed.all_gather_object(states, state)
    return states


def write_atomically(trainer: L.Trainer) -> None:
    """Make a Trainer write its checkpoints atomically, unless the user gave it another ``CheckpointIO``."""
    strategy = trainer.strategy
    if type(strategy.checkpoint_io) is TorchCheckpointIO:
        strategy.checkpoint_io = AtomicCheckpointIO()
    if isinstance(strategy, FSDPStrategy | ModelParallelStrategy):
        write_shards_atomically(strategy)


def can_write_in_background(trainer: L.Trainer) -> bool:
    """Return whether a Trainer writes checkpoints atomically, all from rank 0, and does not read them at once.

    Several ``ModelCheckpoint`` callbacks, and loggers that upload models, look for a file when it has been saved.
    """
    strategy, callbacks = trainer.strategy, trainer.checkpoint_callbacks
    is_atomic = type(strategy.checkpoint_io) is AtomicCheckpointIO
    reads = len(callbacks) > 1 or any(getattr(callback, "save_last", None) == "link" for callback in callbacks)
    reads |= any(getattr(logger, "_log_model", False) for logger in trainer.loggers)
    return is_atomic and not reads and not isinstance(strategy, FSDPStrategy | ModelParallelStrategy)


def write_shards_atomically(strategy: Strategy) -> None:
    """Make a strategy write sharded checkpoints atomically. Does nothing the second time."""
    if "save_checkpoint" in vars(strategy):
        return
    save = strategy.save_checkpoint

    def save_and_rename(checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Let every rank write into a folder beside the target, and rename it when all have finished."""
        part, started = f"{filepath}{PART}", time.perf_counter()
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
                if target.exists():  # removing a folder takes long, so it is only renamed until the new one is there
                    os.replace(target, old)
            os.replace(part, target)
            flush_folder(Path(filepath).parent)
            shutil.rmtree(old) if old.is_dir() else old.unlink(missing_ok=True)
            rank_zero_info(written_line(target, time.perf_counter() - started))
        strategy.barrier()

    strategy.save_checkpoint = save_and_rename  # type: ignore[method-assign]


def is_complete(path: Path) -> bool:
    """Return whether a checkpoint has every byte that was written."""
    return damage(path) is None


def damage(path: Path) -> str | None:
    """Return what is wrong with a checkpoint; None if it is complete."""
    if not path.is_dir():
        try:
            with zipfile.ZipFile(path) as file:
                is_intact = file.testzip() is None  # reads the file and compares checksums
        except (OSError, zipfile.BadZipFile, EOFError, RuntimeError, ValueError):
            is_intact = False
        return None if is_intact else "it was cut short, or its bytes are not those that were written"
    try:
        sizes = json.loads((path / SIZES).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return f"there is no {SIZES}, which is written last"
    if missing := [name for name in sizes if not (path / name).exists()]:
        return f"{', '.join(missing)} of its {len(sizes)} files are missing"
    cut_short = [name for name, size in sizes.items() if (path / name).stat().st_size != size]
    return f"{', '.join(cut_short)} are cut short" if cut_short else None


def write_sizes(folder: Path) -> None:
    """Write the size of each file of a sharded checkpoint."""
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    (folder / SIZES).write_text(json.dumps(sizes), encoding="utf-8")


def saved_step(path: Path) -> int | None:
    """Return the optimizer step of a checkpoint, read without its tensors; None if it cannot be read."""
    try:
        file = path / META if path.is_dir() else path
        return int(torch.load(file, map_location="meta", weights_only=True, mmap=True)["global_step"])
    except Exception:  # a damaged file raises errors of many kinds
        return None


def newest_checkpoint(folder: Path) -> Path:
    """Return the complete checkpoint of a folder with the highest step. Warn about those that are damaged.

    The step is read from the file: the modification time changes when a folder is copied. If ``last.ckpt`` has a lower
    step but was written later, the run was resumed from an earlier step, and ``last.ckpt`` is used.
    """
    steps = {path: saved_step(path) for path in folder.glob("*.ckpt")}
    damaged = {path for path, step in steps.items() if step is None and not is_complete(path)}

    def order(path: Path) -> tuple[int, bool, int]:
        step = steps[path]
        return -1 if step is None else step, path.name.startswith("last"), path.stat().st_mtime_ns

    for path in sorted(steps.keys() - damaged, key=order, reverse=True):
        if is_complete(path):
            if damaged:
                names = ", ".join(sorted(path.name for path in damaged))
                warnings.warn(
                    f"damaged, so not used: {names} in {folder}. Using {path.name}, the newest complete checkpoint",
                    stacklevel=2,
                )
            return _last_written(path, steps)
        damaged.add(path)
    if damaged:
        raise FileNotFoundError(f"all {len(damaged)} checkpoints in {folder} are damaged")
    raise FileNotFoundError(
        f"there is no checkpoint in {folder} to resume from: start the run in another folder, or delete this one if it "
        "was stopped before its first checkpoint"
    )


def _last_written(highest: Path, steps: dict[Path, int | None]) -> Path:
    """Return ``last.ckpt`` instead of the checkpoint with the highest step if it was written later; warn about it."""
    last = highest.with_name("last.ckpt")
    if last == highest or last not in steps or steps[last] == steps[highest] or not is_complete(last):
        return highest
    if last.stat().st_mtime_ns <= highest.stat().st_mtime_ns:
        return highest
    warnings.warn(
        f"{last} is of step {steps[last]} and was written after {highest.name} of step {steps[highest]}: the run was "
        f"resumed from an earlier step. Using {last.name}; to use the other, give its path",
        stacklevel=3,
    )
    return last


def remove_partial(folder: Path) -> None:
    """Remove partly written checkpoints of a process that was killed."""
    for path in folder.glob(f"*{PART}"):
        with contextlib.suppress(OSError):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def flush_folder(folder: Path) -> None:
    """Flush a folder's entries to disk, so that a rename survives a power failure, if the system supports it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _reason(error: BaseException | None) -> str:
    """Return the reason of the operating system in the chain of errors that led to this one."""
    while error is not None and not isinstance(error, OSError):
        error = error.__context__
    return "the disk did not accept it" if error is None else error.strerror or str(error)
