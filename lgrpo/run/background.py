"""Checkpoints that are written by a thread while training goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from lgrpo.run.checkpoints import AtomicCheckpointIO, moment
from lgrpo.run.host_copy import fits_in_host_memory, in_host_memory


class BackgroundCheckpointIO(AtomicCheckpointIO):
    """Copies a checkpoint to host memory and lets a thread write it, between ``start`` and ``teardown``.

    The thread does one thing at a time, in the order of the calls: a checkpoint is removed, and ``last.ckpt`` linked,
    after the file before it is complete. Saving waits until the previous checkpoint is written, so there is at most one
    copy. What failed in the thread is reported by the next ``save_checkpoint``, ``report``, ``wait`` or ``teardown``: a
    disk that does not accept a file as a warning, everything else as the error that it is.

    Written at once instead: a checkpoint whose copy would take more than half of the free host memory, one that SLURM
    waits for, and one that is not on a local disk.
    """

    def __init__(self) -> None:
        super().__init__()
        self._thread: futures.ThreadPoolExecutor | None = None
        self._jobs: list[futures.Future[None]] = []
        self._error: BaseException | None = None
        self._copied: tuple[Any, dict[str, Any]] | None = None
        """Moment and copy of a checkpoint that is being written."""
        self._messages: SimpleQueue[tuple[Callable[[str], None], str]] = SimpleQueue()

    def start(self) -> None:
        """Write in the background from now on."""
        if self._thread is None:
            self._thread = futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        started, now = time.perf_counter(), moment(checkpoint)
        is_awaited = Path(path).name.startswith("hpc_ckpt")  # SLURM ends the process next
        if not is_awaited:
            self.report()
        is_local = "://" not in str(path) and storage_options is None
        copied = self._copy(checkpoint, now) if self._thread and is_local and not is_awaited else None
        if copied is None:
            futures.wait(self._jobs)
            super().save_checkpoint(checkpoint, path, storage_options)
            self.wait()  # afterwards: an error of an earlier checkpoint must not prevent this one
        else:
            waited = time.perf_counter() - started
            self._submit(lambda: self.write(copied, Path(path), now, waited))

    def _copy(self, checkpoint: dict[str, Any], now: Any) -> dict[str, Any] | None:
        """Return a copy of a checkpoint of the moment ``now``; None if it would be too large, or cannot be made."""
        if self._copied is not None and self._copied[0][:-1] == now[:-1]:  # at most the state of callbacks differs
            if self._copied[0] != now:
                self._copied = now, self._copied[1] | {"callbacks": in_host_memory(checkpoint["callbacks"])}
            return self._copied[1]
        self.wait()
        try:
            if not fits_in_host_memory(checkpoint):
                return None
            self._copied = now, in_host_memory(checkpoint)
        except (MemoryError, RuntimeError):  # no memory, or tensors that only torch.save can read
            return None
        return self._copied[1]

    def remove_checkpoint(self, path: str | Path) -> None:
        if self._thread is None:
            super().remove_checkpoint(path)
        else:
            self._submit(lambda: AtomicCheckpointIO.remove_checkpoint(self, path))

    def load_checkpoint(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        self.wait()
        return super().load_checkpoint(*arguments, **options)

    def report(self) -> None:
        """Report what the thread wrote, or could not write, since the last call; raise its first error."""
        if not all(job.done() for job in self._jobs):
            return
        self._copied, self._jobs = None, []  # frees its memory
        while not self._messages.empty():
            tell, text = self._messages.get()
            tell(text)
        error, self._error = self._error, None
        if error is not None:
            raise error

    def wait(self) -> None:
        """Wait until everything is written and removed; raise the first error of the thread."""
        futures.wait(self._jobs)
        self.report()

    def wait_at_most(self, seconds: float) -> None:
        """Wait until everything is written, but not for longer, because the process is about to end."""
        futures.wait(self._jobs, seconds)

    def teardown(self) -> None:
        """Wait, and write at once from now on. The Trainer calls it at the end of ``fit``, also after an error."""
        thread, self._thread = self._thread, None  # before it waits: an interrupt writes a checkpoint at once
        if thread is not None:
            thread.shutdown()
        self.wait()

    def inform(self, tell: Callable[[str], None], text: str) -> None:
        self._messages.put((tell, text))

    def _submit(self, act: Callable[[], None]) -> None:
        def run() -> None:
            if self._error is None:  # otherwise the last complete checkpoint would be removed
                try:
                    act()
                except BaseException as error:
                    self._error = error

        assert self._thread is not None
        self._jobs.append(self._thread.submit(run))
