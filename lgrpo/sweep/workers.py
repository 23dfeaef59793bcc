"""Processes that run ``lgrpo fit``: one for each run, or a few that run one after the other and keep their engine."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar, final

Job = TypeVar("Job")

_EXIT_TIMEOUT = 120.0
"""Seconds that a worker may take to close its engine before it is killed."""


class Runner(ABC):
    """Runs ``lgrpo fit`` in processes. ``run`` may be called from several threads; ``close`` ends all processes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._is_stopped = False

    @abstractmethod
    def run(self, arguments: list[str], log: Path) -> int | None:
        """Run with these arguments, append the output to ``log``, and return the exit status; None if stopped."""

    def stop(self) -> None:
        """Interrupt every process, which then writes a checkpoint and exits, and start no further ones."""
        with self._lock:
            self._is_stopped = True
            for process in self._running:
                process.send_signal(signal.SIGINT)

    def close(self) -> None:  # noqa: B027
        """End the processes that are left. No run is in progress."""

    def for_each(self, jobs: Iterable[Job], train: Callable[[Job], None], at_a_time: int) -> None:
        """Call a function, which calls ``run``, for each job in several threads, and ``close`` at the end.

        If a call raises or the user interrupts, the runs that are in progress are stopped.
        """
        try:
            with ThreadPoolExecutor(at_a_time, thread_name_prefix="sweep") as threads:
                futures = [threads.submit(train, job) for job in jobs]
                try:
                    for future in futures:
                        future.result()
                except BaseException:
                    self.stop()
                    raise
        finally:
            self.close()

    def _start(
        self, arguments: list[str], log: Path, environment: Mapping[str, str], descriptors: tuple[int, ...] = ()
    ) -> subprocess.Popen[bytes] | None:
        """Start ``lgrpo`` in its own session, so that Ctrl-C reaches it only through ``stop``; None if stopped."""
        with log.open("ab") as file, self._lock:
            if self._is_stopped:
                return None
            process = subprocess.Popen(
                [sys.executable, "-m", "lgrpo.cli", *arguments],
                stdin=subprocess.DEVNULL if descriptors else None,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                pass_fds=descriptors,
            )
            self._running.add(process)
            return process

    def _ended(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            self._running.discard(process)


@final
class SeparateProcesses(Runner):
    """Each run is a process of its own."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        super().__init__()
        self._environment = environment

    def run(self, arguments: list[str], log: Path) -> int | None:
        process = self._start(["fit", *arguments], log, self._environment)
        if process is None:
            return None
        status = process.wait()
        self._ended(process)
        return None if self._is_stopped else status


@final
class SharedWorkers(Runner):
    """Each run is done by one of ``num_workers`` processes, which keep their engine from run to run.

    A worker is started by the first run it gets. After a run that fails it is replaced.
    """

    def __init__(self, num_workers: int, environment: Mapping[str, str]) -> None:
        super().__init__()
        self._environment = environment
        self._idle: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(num_workers):
            self._idle.put(None)

    def run(self, arguments: list[str], log: Path) -> int | None:
        worker = self._idle.get()
        try:
            if self._is_stopped:
                return None
            worker = worker or self._start_worker(log)
            if worker is None:
                return None
            status = worker.run(arguments, log)
            if status:
                self._ended(worker.process)
                worker = None
            return None if self._is_stopped else status
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        while not self._idle.empty():
            if (worker := self._idle.get()) is not None:
                worker.close()
                self._ended(worker.process)

    def _start_worker(self, log: Path) -> _Worker | None:
        connection, remote = Pipe()
        command = ["sweep", "--worker", str(remote.fileno())]
        process = self._start(command, log, self._environment, (remote.fileno(),))
        remote.close()
        if process is None:
            connection.close()
            return None
        return _Worker(process, connection)


class _Worker:
    """The sweep's end of the pipe to a worker (``lgrpo.commands.shared_runs``)."""

    def __init__(self, process: subprocess.Popen[bytes], connection: Connection) -> None:
        self.process = process
        self._connection = connection

    def run(self, arguments: list[str], log: Path) -> int:
        """Run ``lgrpo fit`` and return its exit status. Unless that is 0, the process has ended afterwards."""
        try:
            self._connection.send((arguments, str(log.resolve())))
            status = self._connection.recv()
        except (EOFError, OSError):  # the process was killed during the run
            return self.close() or 1
        if status:
            self.close()
        return status

    def close(self) -> int:
        """End the process, which closes its engine, and return its exit status."""
        self._connection.close()
        try:
            return self.process.wait(_EXIT_TIMEOUT)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            return self.process.wait()
