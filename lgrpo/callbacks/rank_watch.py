"""Detection of failed ranks by the others."""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import lightning as L
import torch.distributed as dist
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher

from lgrpo.hooks import rollout_owner
from lgrpo.run.background import BackgroundCheckpointIO

_PERIOD = 1.0
"""Seconds between two checks whether the watch should end."""
_CLOSE_TIMEOUT = 10.0
"""Seconds to wait for the engine to close."""
_WRITE_TIMEOUT = 120.0
"""Seconds to wait for a checkpoint that is being written."""


class RankWatch(L.Callback):
    """Ends every rank on a machine within seconds after one of them fails, and reports which one.

    Without it a rank may wait for a failed one until the process group's timeout (``timeout`` of the strategy), which
    also limits ranks on other machines, and ranks that Lightning started would survive the first. A thread watches from
    ``setup`` to ``on_fit_end`` or ``on_exception``.
    """

    def __init__(self) -> None:
        self._peers: dict[int, int] = {}  # process ids of the other ranks on this machine, by rank
        self._files: dict[int, int] = {}  # ranks by the pidfd of their process
        self._trainer: L.Trainer | None = None
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._over.set()

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit" or trainer.world_size == 1 or not self._over.is_set():
            return
        processes: list[tuple[str, int]] = [("", 0)] * trainer.world_size
        dist.all_gather_object(processes, (_machine(), os.getpid()))
        here = processes[trainer.global_rank][0]
        self._peers = {
            rank: pid
            for rank, (machine, pid) in enumerate(processes)
            if machine == here and rank != trainer.global_rank
        }
        self._files = {}
        with contextlib.suppress(AttributeError, OSError):  # not every system has pidfds
            self._files = {os.pidfd_open(pid): rank for rank, pid in self._peers.items()}
        self._trainer, self._over = trainer, threading.Event()
        for thread in threading.enumerate():
            if isinstance(thread, _ChildProcessObserver):  # it would kill without a message, before servers are closed
                thread._run = lambda: False  # type: ignore[method-assign]
        arguments = (self._files, self._over)  # a later fit replaces both while this thread may still run
        threading.Thread(target=self._watch, args=arguments, name="rank-watch", daemon=True).start()

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self._over.is_set():
            trainer.strategy.barrier()  # a rank may exit only after all have finished
            self._stop(self._over)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Report a failed rank as the last message, if the exception may be its consequence."""
        if self._over.is_set():
            return
        failed = None if isinstance(exception, KeyboardInterrupt) else self._failed_rank(self._files, 2.0)
        if self._stop(self._over) and failed is not None:
            atexit.register(print, f"lgrpo: {self._exit_message(failed)}", file=sys.stderr)

    def _stop(self, over: threading.Event) -> bool:
        """End a watch; return whether it was still active."""
        with self._lock:
            was_over = over.is_set()
            over.set()
        for thread in threading.enumerate():
            if isinstance(thread, _ChildProcessObserver):
                thread.__dict__.pop("_run", None)
        return not was_over

    def _watch(self, files: dict[int, int], over: threading.Event) -> None:
        try:
            while (failed := self._failed_rank(files, _PERIOD)) is None:
                if over.is_set():
                    return
            if not self._stop(over):
                return
            assert self._trainer is not None
            lowest_peer = min(self._peers.keys() - {failed}, default=self._trainer.global_rank)
            if self._trainer.global_rank <= lowest_peer:  # one rank reports for all
                print(f"lgrpo: {self._exit_message(failed)}", file=sys.stderr, flush=True)
            closing = threading.Thread(target=rollout_owner(self._trainer).engine.close, daemon=True)
            closing.start()
            closing.join(_CLOSE_TIMEOUT)
            if isinstance(checkpoint_io := self._trainer.strategy.checkpoint_io, BackgroundCheckpointIO):
                checkpoint_io.wait_at_most(_WRITE_TIMEOUT)
            sys.stdout.flush()
            os._exit(1)  # the main thread may be blocked in a collective, which no exception interrupts
        finally:
            for file in files:
                os.close(file)

    def _failed_rank(self, files: dict[int, int], seconds: float) -> int | None:
        """Wait for a rank to end, at most ``seconds``; return it or None."""
        if files:
            poll = select.poll()
            for file in files:
                poll.register(file, select.POLLIN)
            ended = [files[file] for file, _ in poll.poll(seconds * 1000)]
        else:
            deadline = time.monotonic() + seconds
            while not (ended := [rank for rank, pid in self._peers.items() if not _is_alive(pid)]):
                if time.monotonic() >= deadline:
                    break
                time.sleep(0.2)
        return min(ended, default=None)

    def _exit_message(self, rank: int) -> str:
        return (
            f"rank {rank} (process {self._peers[rank]} on {socket.gethostname()}) {self._exit_status(rank)}. The other "
            "ranks cannot continue without it, so all stop. To resume from the last checkpoint, use the same command "
            "with --run FOLDER --ckpt_path last"
        )

    def _exit_status(self, rank: int) -> str:
        """Return how a rank ended; only the process that started it can find out more than that it did."""
        launcher = None if self._trainer is None else self._trainer.strategy.launcher
        processes = launcher.procs if isinstance(launcher, _SubprocessScriptLauncher) else []
        process = next((p for p in processes if p.pid == self._peers[rank]), None)
        if process is None:
            return "has ended"
        code = process.wait(5)
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}" + (
                " (the system does that when memory runs out)" if -code == signal.SIGKILL else ""
            )
        return f"ended with exit code {code}"


def _machine() -> str:
    """Return a name that is equal for processes that can see each other's process ids."""
    namespace = Path("/proc/self/ns/pid")
    return f"{socket.gethostname()} {os.readlink(namespace) if namespace.exists() else ''}"


def _is_alive(pid: int) -> bool:
    try:
        with contextlib.suppress(PermissionError):  # a process of another user
            os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
