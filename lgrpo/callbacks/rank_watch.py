"""Ranks that look after each other."""

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

_PERIOD = 1.0
"""Seconds between two looks, where the system does not tell of itself."""
_PATIENCE = 10.0
"""Seconds the engine has to close."""


class RankWatch(L.Callback):
    """When a rank dies, every other rank on its machine ends within seconds, and says which one it was.

    Left alone, a rank may wait for a dead one until the process group's timeout (``timeout`` of the strategy), which
    also is the limit for ranks on other machines; and those that Lightning started go on without the first.
    """

    def __init__(self) -> None:
        self._peers: dict[int, int] = {}  # rank → process, of those on this machine
        self._files: dict[int, int] = {}  # open file of a process → its rank
        self._trainer: L.Trainer | None = None
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._over.set()

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit" or trainer.world_size == 1 or not self._over.is_set():
            return
        places: list[tuple[str, int]] = [("", 0)] * trainer.world_size
        dist.all_gather_object(places, (_machine(), os.getpid()))
        here = places[trainer.global_rank][0]
        self._peers = {
            rank: pid for rank, (where, pid) in enumerate(places) if where == here and rank != trainer.global_rank
        }
        self._files = {}
        with contextlib.suppress(AttributeError, OSError):  # not every system tells of a process's end
            self._files = {os.pidfd_open(pid): rank for rank, pid in self._peers.items()}
        self._trainer, self._over = trainer, threading.Event()
        for thread in threading.enumerate():
            if isinstance(thread, _ChildProcessObserver):  # it kills without a word, and before servers are closed
                thread._run = lambda: False  # type: ignore[method-assign]
        given = (self._files, self._over)  # its own: when it looks up, the next fit may have begun
        threading.Thread(target=self._watch, args=given, name="rank-watch", daemon=True).start()

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self._over.is_set():
            trainer.strategy.barrier()  # who comes this far may end
            self._stop(self._over)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """What went wrong here may follow from the end of another rank: then that is said last."""
        if self._over.is_set():
            return
        dead = None if isinstance(exception, KeyboardInterrupt) else self._dead(self._files, 2.0)
        if self._stop(self._over) and dead is not None:
            atexit.register(print, f"lgrpo: {self._obituary(dead)}", file=sys.stderr)

    def _stop(self, over: threading.Event) -> bool:
        """Ends a watch. Whether it was still going on."""
        with self._lock:
            was_over = over.is_set()
            over.set()
        for thread in threading.enumerate():
            if isinstance(thread, _ChildProcessObserver):
                thread.__dict__.pop("_run", None)
        return not was_over

    def _watch(self, files: dict[int, int], over: threading.Event) -> None:
        try:
            while (dead := self._dead(files, _PERIOD)) is None:
                if over.is_set():
                    return
            if not self._stop(over):
                return
            assert self._trainer is not None
            if self._trainer.global_rank <= min(
                self._peers.keys() - {dead}, default=self._trainer.global_rank
            ):  # one says it for all
                print(f"lgrpo: {self._obituary(dead)}", file=sys.stderr, flush=True)
            closing = threading.Thread(target=rollout_owner(self._trainer).engine.close, daemon=True)
            closing.start()
            closing.join(_PATIENCE)
            sys.stdout.flush()
            os._exit(1)  # the main thread may wait for the dead one, where no exception reaches it
        finally:
            for file in files:
                os.close(file)

    def _dead(self, files: dict[int, int], seconds: float) -> int | None:
        """A rank that has ended, waited for so long."""
        if files:
            poll = select.poll()
            for file in files:
                poll.register(file, select.POLLIN)
            ended = [files[file] for file, _ in poll.poll(seconds * 1000)]
        else:
            deadline = time.monotonic() + seconds
            while not (ended := [rank for rank, pid in self._peers.items() if not _lives(pid)]):
                if time.monotonic() >= deadline:
                    break
                time.sleep(0.2)
        return min(ended, default=None)

    def _obituary(self, rank: int) -> str:
        return (
            f"rank {rank} (process {self._peers[rank]} on {socket.gethostname()}) {self._fate(rank)}. Without it the "
            "others cannot go on, so all ranks stop. To go on from the last checkpoint, give the same command with "
            "--run FOLDER --ckpt_path last"
        )

    def _fate(self, rank: int) -> str:
        """How it ended, as far as this process can know: the system tells who started it."""
        launcher = None if self._trainer is None else self._trainer.strategy.launcher
        if not isinstance(launcher, _SubprocessScriptLauncher):
            return "has ended"
        process = next((p for p in launcher.procs if p.pid == self._peers[rank]), None)
        code = None if process is None else process.wait(5)
        if code is None:
            return "has ended"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}" + (
                " (the system does that when memory runs out)" if -code == signal.SIGKILL else ""
            )
        return f"ended with exit code {code}"


def _machine() -> str:
    """The same for processes that can see each other."""
    space = Path("/proc/self/ns/pid")
    return f"{socket.gethostname()} {os.readlink(space) if space.exists() else ''}"


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
