"""The folder of a run: whose it is, and whether anything happened in it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from pathlib import Path

_BEFORE_THE_FIRST_SYNC = {"config.yaml", "metrics", "tensorboard"}
_PATIENCE = 5.0
"""Seconds that what is left of a run that was killed may take to end."""


class RunFolder:
    """Where a run writes. One process at a time has it: whatever ends that process gives it back."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    def claim(self, resuming: bool) -> None:
        """Makes it this process's; refused where it is another's, or holds a run that this one does not go on with."""
        if self.path.exists() and not self.path.is_dir():
            raise SystemExit(f"lgrpo: the run folder {self.path} is a file")
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.path, os.O_RDONLY)
        if not _locks(self._lock):
            self.release()
            raise SystemExit(f"lgrpo: another process is at a run in {self.path}")
        if any(self.path.iterdir()) and not resuming:
            self.release()
            raise SystemExit(
                f"lgrpo: the run folder {self.path} exists already, and nothing of it is overwritten. Choose another "
                "--run, or go on with it by --ckpt_path last"
            )

    def leave(self) -> None:
        """After an error: where nothing happened yet, it is not in the way when the mistake is mended."""
        if self._lock is None:
            return
        has_metrics = any(self.path.glob("metrics/*/metrics.csv"))
        if not has_metrics and {path.name for path in self.path.iterdir()} <= _BEFORE_THE_FIRST_SYNC:
            shutil.rmtree(self.path, ignore_errors=True)
        self.release()

    def release(self) -> None:
        """Another process, or another run of this one, may have it."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _locks(folder: int) -> bool:
    """Whether a folder, by its descriptor, is this process's from now on; where locks are not known, it is."""
    until = time.monotonic() + _PATIENCE
    while True:
        try:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
        except OSError:
            return True
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
