"""Worker processes that score, each killed when it takes too long or too much, and replaced."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from typing import Any

import dill

from lgrpo.rewards.base import NOT_YET, AsyncReward, BatchReward, Failure, Score
from lgrpo.types import Completion, Prompt

_LONGEST_ANSWER = 2**20  # bytes
_GRACE = 2.0  # seconds a worker that waits for many scores at once has to say which one was late
_PATIENCE = 30.0  # seconds in which a worker is forked, or the process that forks them is taken for hung


@dataclass(kw_only=True, frozen=True)
class Limits:
    """What a worker may take."""

    timeout: float
    """Seconds for a score."""
    memory: int
    """Bytes beyond what it starts with."""
    output: int
    """Bytes it may print, or write to a file, for a score."""


class ScoringError(Exception):
    """A score that did not come: what kind of failure, and why."""

    def __init__(self, kind: Failure, why: str) -> None:
        super().__init__(why)
        self.kind: Failure = kind


@dataclass(slots=True, eq=False)
class Job:
    """Completions that are scored together."""

    prompts: Sequence[Prompt]
    completions: Sequence[Completion]
    future: Future[list[Score]] = field(default_factory=Future)
    deadline: float = 0.0
    alone: bool = False
    """To be scored with nothing beside it: it was at hand when a worker that scores many at once had to be killed."""


@dataclass(slots=True, eq=False)
class Worker:
    """A process, and what it is at."""

    pid: int
    pipe: Connection
    nursery: subprocess.Popen
    jobs: dict[int, Job] = field(default_factory=dict)
    outbox: SimpleQueue[Any] = field(default_factory=SimpleQueue)

    def __post_init__(self) -> None:
        threading.Thread(target=self._post, name="reward-outbox", daemon=True).start()

    def give(self, message: Any) -> None:
        """Sends a job without waiting: a worker that is stuck does not read, and who waited for it would be too."""
        self.outbox.put(message)

    def _post(self) -> None:
        with contextlib.suppress(OSError, TypeError, ValueError):  # it was killed in between: its pipe is closed
            while (message := self.outbox.get()) is not None:
                self.pipe.send(message)

    def is_orphan(self) -> bool:
        """Whether its nursery was killed: a worker dies with it, a moment before it can be buried."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.nursery.wait(0.05)
        return self.nursery.returncode is not None

    def kill(self) -> None:
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(self.pid, signal.SIGKILL)
        self.outbox.put(None)
        self.pipe.close()


class WorkerPool:
    """Scores jobs in processes of their own, in a thread of its own, for any number of callers."""

    def __init__(self, reward: BatchReward, num_workers: int, limits: Limits) -> None:
        self.reward = reward
        self.num_workers = num_workers
        self.limits = limits
        self.capacity = reward.concurrency if isinstance(reward, AsyncReward) else 1
        """Jobs a worker takes at once."""
        self.workers: list[Worker] = []
        self._waiting: deque[Job] = deque()
        self._lock = threading.Lock()
        self._closing = False
        self._error: BaseException = RuntimeError("the reward's workers are closed")
        self._count = 0
        self._ear, self._mouth = Pipe(duplex=False)
        self._is_woken = False
        self.nursery = Nursery(reward, limits)
        self._thread = threading.Thread(target=self._run, name="reward-workers", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def submit(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> Future[list[Score]]:
        """Has completions scored together. The future raises a ScoringError where that failed."""
        job = Job(prompts, completions)
        with self._lock:
            if self._closing:
                raise self._error
            self._waiting.append(job)
            self._wake()
        return job.future

    def close(self) -> None:
        """Ends the processes."""
        with self._lock:
            closing, self._closing = self._closing, True
            if not closing:
                self._wake()
        self._thread.join()
        atexit.unregister(self.close)

    def _wake(self) -> None:
        """Has the thread look; with the lock. Once is enough: a pipe is full some time, and would be waited for."""
        if not self._is_woken:
            self._is_woken = True
            self._mouth.send_bytes(b".")

    # In the thread

    def _run(self) -> None:
        try:
            while not self._closing:
                self._assign()
                self._listen()
        except BaseException as what:
            self._error = what
        with self._lock:
            self._closing = True
        for job in [*self._waiting, *(job for worker in self.workers for job in worker.jobs.values())]:
            job.future.set_exception(self._error)
        for worker in self.workers:
            worker.kill()
        self.nursery.close()

    def _assign(self) -> None:
        """Gives what waits to workers that have room, and hires more where there are too few."""
        while self._waiting:
            job = self._waiting[0]
            room = 1 if job.alone else self.capacity
            free = [w for w in self.workers if len(w.jobs) < room and not any(j.alone for j in w.jobs.values())]
            if free:
                worker = min(free, key=lambda w: len(w.jobs))
            elif len(self.workers) < self.num_workers:
                worker = self.nursery.hire()
                self.workers.append(worker)
            else:
                return
            self._waiting.popleft()
            self._count += 1
            grace = _GRACE if self.capacity > 1 else 0.0
            job.deadline = time.monotonic() + self.limits.timeout + grace
            worker.jobs[self._count] = job
            worker.give((self._count, job.prompts, job.completions))

    def _listen(self) -> None:
        """Waits for the next answer, the next deadline or the next job."""
        busy = [worker for worker in self.workers if worker.jobs]
        deadlines = [job.deadline for worker in busy for job in worker.jobs.values()]
        patience = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
        ready = wait([self._ear, *(worker.pipe for worker in self.workers)], patience)
        if self._ear in ready:
            self._ear.recv_bytes()
            with self._lock:
                self._is_woken = False
        for worker in list(self.workers):
            if worker.pipe in ready:
                self._hear(worker)
            elif worker.jobs and time.monotonic() >= min(job.deadline for job in worker.jobs.values()):
                self._replace(worker, "timeouts", f"a score took longer than {self.limits.timeout:g} s")

    def _hear(self, worker: Worker) -> None:
        try:
            answer = json.loads(worker.pipe.recv_bytes(_LONGEST_ANSWER))
        except (EOFError, OSError, ValueError):
            self._replace(worker, "crashes", "the process of a reward ended")
            return
        if "flood" in answer:
            self._replace(worker, "output", f"a score printed or wrote more than {self.limits.output / 2**20:g} MiB")
            return
        job = worker.jobs.pop(answer["job"], None)
        if job is None:
            return
        if "scores" in answer:
            job.future.set_result([NOT_YET if score is None else float(score) for score in answer["scores"]])
            return
        job.future.set_exception(ScoringError(answer["kind"], answer["error"]))
        if answer["kind"] == "memory":  # what it hoards, the next score would lack
            self._replace(worker, "memory", answer["error"])

    def _replace(self, worker: Worker, kind: Failure, why: str) -> None:
        worker.kill()
        self.workers.remove(worker)
        jobs = list(worker.jobs.values())
        is_shared = len(jobs) > 1 or kind == "memory" or (kind == "crashes" and worker.is_orphan())
        if not is_shared or all(job.alone for job in jobs):
            for job in jobs:
                job.future.set_exception(ScoringError(kind, why))
            return
        for job in jobs:  # one of them did it, or none: each gets another chance, with nothing beside it
            job.alone = True
        with self._lock:
            self._waiting.extendleft(reversed(jobs))


class Nursery:
    """A process that has a reward loaded, from which workers are forked in milliseconds."""

    def __init__(self, reward: BatchReward, limits: Limits) -> None:
        self._reward = reward
        self._limits = limits
        self.process: subprocess.Popen | None = None
        self._channel: socket.socket | None = None

    def hire(self) -> Worker:
        """One more worker; of a nursery that was killed, from another one."""
        for _ in range(2):
            if self._channel is None:
                self._open()
            if (worker := self._ask()) is not None:
                return worker
            self.close()
        raise RuntimeError("the process that starts reward workers ends again and again")

    def _ask(self) -> Worker | None:
        """A worker, unless the nursery is gone."""
        assert self._channel is not None
        assert self.process is not None
        own, theirs = Pipe()
        try:
            socket.send_fds(self._channel, [b"w"], [theirs.fileno()])
            answer = self._channel.recv(32)
        except OSError:
            answer = b""
        theirs.close()
        if answer:
            return Worker(int(answer), own, self.process)
        own.close()
        return None

    def close(self) -> None:
        if self.process is not None and self._channel is not None:
            self._channel.close()
            self.process.kill()
            self.process.wait()
        self.process, self._channel = None, None

    def _pickled(self) -> bytes:
        try:
            return dill.dumps(self._reward, recurse=True)  # with what it uses of the script it was written in
        except Exception as error:
            raise RuntimeError(
                f"{type(self._reward).__name__} cannot be sent to another process ({type(error).__name__}: {error}): "
                "keep what cannot be pickled out of it, or set data.scoring to null to have it in this one"
            ) from error

    def _open(self) -> None:
        pickled = self._pickled()
        own, theirs = socket.socketpair()
        command = [sys.executable, "-m", "lgrpo.rewards.nursery", str(theirs.fileno())]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        self.process = subprocess.Popen(
            command,
            env=environment,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        theirs.close()
        self._channel = own
        limits = [self._limits.timeout, self._limits.memory, self._limits.output]
        own.settimeout(120)
        try:
            own.sendall(json.dumps([len(pickled), *limits]).encode())
            own.recv(1)
            own.sendall(pickled)
            answer = own.recv(1024).decode()
        except OSError as error:
            raise RuntimeError("the process that starts reward workers did not answer") from error
        if answer != "k":
            name = type(self._reward).__name__
            raise RuntimeError(f"{name} cannot be loaded in another process: {answer or 'it ended'}")
        own.settimeout(_PATIENCE)
