"""Trainer's handle of the process that has an object loaded and forks workers from itself (``worker.py``)."""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Protocol

import dill

from lgrpo.checks import check_count, check_range
from lgrpo.rewards.workers.loop import WorkerLoop

_START_TIMEOUT = 120.0  # seconds in which the process imports lgrpo and loads the object
_FORK_TIMEOUT = 30.0  # seconds in which a worker is forked; after that the process counts as hung
_END_TIMEOUT = 20.0  # seconds in which the process ends all others that it and its workers started


@dataclass(kw_only=True, frozen=True)
class Scoring:
    """Worker processes that run a reward, and their limits."""

    num_workers: int = 2
    """Number of processes for each reward on each rank."""
    timeout: float = 10.0
    """Seconds a completion may take before its worker is killed and replaced."""
    memory_gib: float = 2.0
    """Memory a worker may take in addition to what it starts with."""
    output_mib: float = 16.0
    """Size of the output of a worker for a completion, and of any file it writes."""
    failure_score: float = 0.0
    """Reward of a completion whose scoring failed."""
    mask_failures: bool = False
    """Take completions whose scoring failed out of the loss. They still count among their siblings."""

    def __post_init__(self) -> None:
        check_count("scoring.num_workers", self.num_workers, at_least=1)
        check_range("scoring.timeout", self.timeout, above=0)
        check_range("scoring.memory_gib", self.memory_gib, above=0)
        check_range("scoring.output_mib", self.output_mib, above=0)
        if not math.isfinite(self.failure_score):
            raise ValueError(f"scoring.failure_score is {self.failure_score}; it must be a finite number")


class WorkerLimits(Protocol):
    """Limits of a worker."""

    @property
    def timeout(self) -> float: ...
    @property
    def memory_gib(self) -> float: ...
    @property
    def output_mib(self) -> float: ...


class ForkServer:
    """Process that has an object loaded, from which workers are forked in milliseconds.

    ``fork_worker`` starts the process if it is not running. ``close`` ends it, its workers, and all processes that
    they started.
    """

    kind = "reward"
    """Kind of object, for messages."""
    setting = "data.scoring"
    """Setting of the limits, for messages."""

    def __init__(self, served: object, loop: type[WorkerLoop], limits: WorkerLimits) -> None:
        """
        Args:
            served: Object to load. It is pickled by value, so its class may be defined in a notebook.
            loop: Main loop of the workers.
            limits: Limits of each worker.
        """
        self._served = served
        self._loop = loop
        self._limits = limits
        self.process: subprocess.Popen | None = None
        self._channel: socket.socket | None = None

    def fork_worker(self) -> tuple[int, Connection, subprocess.Popen]:
        """Return a new worker: its supervisor's process id, the pipe to it, and the process it was forked from."""
        for _ in range(2):
            if self._channel is None:
                self._start()
            if (worker := self._fork()) is not None:
                return worker
            self.close(timeout=0.0)
        raise RuntimeError(f"the process that starts {self.kind} workers ends again and again")

    def close(self, timeout: float = _END_TIMEOUT) -> None:
        """End all processes; kill this one, which signals its workers' supervisors, if that exceeds ``timeout``."""
        if self.process is not None and self._channel is not None:
            self._channel.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout)
            self.process.kill()
            self.process.wait()
        self.process, self._channel = None, None

    def _fork(self) -> tuple[int, Connection, subprocess.Popen] | None:
        """Return a new worker, or None if the process has ended or hangs."""
        assert self._channel is not None
        assert self.process is not None
        own, theirs = Pipe()
        try:
            socket.send_fds(self._channel, [b"w"], [theirs.fileno()])
            answer = self._channel.recv(32)
        except OSError:
            answer = b""
        theirs.close()
        if answer and int(answer):
            return int(answer), own, self.process
        own.close()
        if answer:
            raise RuntimeError(
                f"the system starts no more processes for {self.kind} workers: raise its limit (ulimit -u, or pids.max "
                "of the container)"
            )
        return None

    def _start(self) -> None:
        pickled = self._pickled()
        own, theirs = socket.socketpair()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lgrpo.rewards.workers.worker", str(theirs.fileno())],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        theirs.close()
        self._channel = own
        memory, output = int(self._limits.memory_gib * 2**30), int(self._limits.output_mib * 2**20)
        own.settimeout(_START_TIMEOUT)
        try:
            own.sendall(json.dumps([len(pickled), self._limits.timeout, memory, output]).encode())
            own.recv(1)
            own.sendall(pickled)
            answer = own.recv(1024).decode()
        except OSError as error:
            raise RuntimeError(f"the process that starts {self.kind} workers did not answer") from error
        if answer != "k":
            name = type(self._served).__name__
            raise RuntimeError(f"{name} cannot be loaded in another process: {answer or 'it ended'}")
        own.settimeout(_FORK_TIMEOUT)

    def _pickled(self) -> bytes:
        try:
            return dill.dumps((self._loop, self._served), recurse=True)  # includes what it uses of a script or notebook
        except Exception as error:
            raise RuntimeError(
                f"{type(self._served).__name__} cannot be sent to another process ({type(error).__name__}: {error}): "
                f"remove what cannot be pickled from it, or set {self.setting} to null to run it in this process"
            ) from error
