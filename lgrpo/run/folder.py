"""The folder of a run and its lock."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

import lightning as L

_BEFORE_THE_FIRST_SYNC = {"config.yaml", "metrics", "tensorboard"}
_LOCK_TIMEOUT = 5.0
"""Seconds to wait for the lock: processes of a run that was killed may take a moment to end."""


class RunFolder:
    """A run folder that one process at a time may write to.

    ``claim`` takes the lock, ``release`` gives it back, and ``leave`` does so after an error. The operating system
    releases the lock when the process ends, however that happens.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    def claim(self, resuming: bool) -> None:
        """Create and lock the folder; exit if another process has the lock or the folder holds a different run."""
        if self.path.exists() and not self.path.is_dir():
            raise SystemExit(f"lgrpo: the run folder {self.path} is a file")
        check_writable(self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.path, os.O_RDONLY)
        if not _acquire(self._lock):
            self.release()
            raise SystemExit(f"lgrpo: another process is using the run folder {self.path}")
        if any(self.path.iterdir()) and not resuming:
            self.release()
            has_checkpoint = any(self.path.rglob("*.ckpt"))
            advice = "resume the run with --ckpt_path last" if has_checkpoint else "delete it: it has no checkpoint"
            raise SystemExit(
                f"lgrpo: the run folder {self.path} exists already, and nothing in it is overwritten. Choose another "
                f"--run, or {advice}"
            )

    def leave(self) -> None:
        """Release the folder after an error, and remove it if the run never got to its first sync."""
        if self._lock is None:
            return
        has_metrics = any(self.path.glob("metrics/*/metrics.csv"))
        if not has_metrics and {path.name for path in self.path.iterdir()} <= _BEFORE_THE_FIRST_SYNC:
            shutil.rmtree(self.path, ignore_errors=True)
        self.release()

    def release(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def check_writable(folder: Path) -> None:
    """Exit if nothing can be written to a folder, or to the one in which it would be created. Leaves nothing there."""
    existing = folder
    while not os.path.exists(existing):
        existing = existing.parent
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"x")
    except OSError as error:
        raise SystemExit(
            f"lgrpo: nothing can be written to the folder {folder} ({error.strerror}): choose another folder, or make "
            f"{existing} writable"
        ) from error


def run_folder(trainer: L.Trainer) -> Path:
    """Return the folder for a run's files: the Trainer's root if the user set one, otherwise the logger's folder."""
    root = Path(trainer.default_root_dir)
    return root if root.resolve() != Path.cwd() or trainer.log_dir is None else Path(trainer.log_dir)


def _acquire(descriptor: int) -> bool:
    """Lock a folder; return False if another process holds the lock. File systems without locks count as locked."""
    deadline = time.monotonic() + _LOCK_TIMEOUT
    while True:
        try:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
        except OSError:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
