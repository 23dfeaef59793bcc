"""Pool of worker processes that score completions; a worker that exceeds a limit is killed and replaced."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import pickle
import signal
import subprocess
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

from lgrpo.rewards.base import NOT_YET, AsyncReward, BatchReward, Failure, NotedScore, Notes, Score
from lgrpo.rewards.workers.fork_server import ForkServer, Scoring
from lgrpo.rewards.workers.scoring_loop import ScoringLoop
from lgrpo.types import Completion, Prompt

_MAX_ANSWER_BYTES = 2**24
_CONCURRENT_GRACE = 2.0  # seconds in which a worker with many concurrent scores reports the late one itself


class ScoringError(Exception):
    """Failure to score completions: its kind, and the reason as message, with the notes of the reward."""

    def __init__(self, kind: Failure, reason: str, notes: Notes | None = None) -> None:
        super().__init__(reason)
        self.kind: Failure = kind
        self.notes = notes


@dataclass(slots=True, eq=False)
class Job:
    """Completions that are scored together."""

    prompts: Sequence[Prompt]
    completions: Sequence[Completion]
    future: Future[list[Score]] = field(default_factory=Future)
    deadline: float = 0.0
    is_alone: bool = False
    """Whether it needs a worker for itself, because a worker was killed while it scored this job among others."""


@dataclass(slots=True, eq=False)
class Worker:
    """Process that scores, and its current jobs."""

    pid: int
    """Process id of its supervisor, which ends the worker and all processes that the worker started."""
    pipe: Connection
    fork_server: subprocess.Popen
    """Process it was forked from."""
    jobs: dict[int, Job] = field(default_factory=dict)
    outbox: SimpleQueue[bytes | None] = field(default_factory=SimpleQueue)

    def __post_init__(self) -> None:
        threading.Thread(target=self._send_messages, name="reward-outbox", daemon=True).start()

    def send(self, message: Any) -> None:
        """Send a job without waiting: a worker that hangs does not read, and must not block its sender.

        Raises what pickle raises for a message that cannot be sent.
        """
        self.outbox.put(pickle.dumps(message))

    def _send_messages(self) -> None:
        with contextlib.suppress(OSError, TypeError, ValueError):  # the pipe is closed when the worker is killed
            while (message := self.outbox.get()) is not None:
                self.pipe.send_bytes(message)

    def is_orphan(self) -> bool:
        """Return whether the fork server has ended, which ends its workers slightly before it can be waited for."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.fork_server.wait(0.05)
        return self.fork_server.returncode is not None

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self.pid, signal.SIGTERM)
        self.outbox.put(None)
        self.pipe.close()


class WorkerPool:
    """Scores jobs in worker processes, for callers in any number of threads.

    ``submit`` returns a future. One thread of the pool assigns jobs to workers, reads their answers and replaces
    workers that failed. ``close`` ends the processes; jobs that are not done raise an error.
    """

    def __init__(self, reward: BatchReward, scoring: Scoring) -> None:
        self.reward = reward
        self.scoring = scoring
        self.capacity = reward.concurrency if isinstance(reward, AsyncReward) else 1
        """Number of concurrent jobs of a worker."""
        self.workers: list[Worker] = []
        self._waiting: deque[Job] = deque()
        self._lock = threading.Lock()
        self._closing = False
        self._error: BaseException = RuntimeError("the reward's workers are closed")
        self._num_jobs = 0
        self._wake_receiver, self._wake_sender = Pipe(duplex=False)
        self._is_woken = False
        self.fork_server = ForkServer(reward, ScoringLoop, scoring)
        self._thread = threading.Thread(target=self._run, name="reward-workers", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def submit(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> Future[list[Score]]:
        """Score completions together. The future raises a ``ScoringError`` if that fails."""
        job = Job(prompts, completions)
        with self._lock:
            if self._closing:
                raise self._error
            self._waiting.append(job)
            self._wake()
        return job.future

    def close(self) -> None:
        """End the processes."""
        with self._lock:
            closing, self._closing = self._closing, True
            if not closing:
                self._wake()
        self._thread.join()
        atexit.unregister(self.close)

    def _wake(self) -> None:
        """Wake the thread; requires the lock. One message at most is sent, because a full pipe would block."""
        if not self._is_woken:
            self._is_woken = True
            self._wake_sender.send_bytes(b".")

    # Below: in the pool's thread.

    def _run(self) -> None:
        try:
            while not self._closing:
                self._assign()
                self._wait()
        except BaseException as error:
            self._error = error
        with self._lock:
            self._closing = True
        for job in [*self._waiting, *(job for worker in self.workers for job in worker.jobs.values())]:
            job.future.set_exception(self._error)
        for worker in self.workers:
            worker.kill()
        self.fork_server.close()

    def _assign(self) -> None:
        """Send waiting jobs to workers with free capacity; start new workers up to ``num_workers``."""
        while self._waiting:
            job = self._waiting[0]
            capacity = 1 if job.is_alone else self.capacity
            free = [w for w in self.workers if len(w.jobs) < capacity and not any(j.is_alone for j in w.jobs.values())]
            if free:
                worker = min(free, key=lambda w: len(w.jobs))
            elif len(self.workers) < self.scoring.num_workers:
                worker = Worker(*self.fork_server.fork_worker())
                self.workers.append(worker)
            else:
                return
            self._waiting.popleft()
            self._num_jobs += 1
            grace = _CONCURRENT_GRACE if self.capacity > 1 else 0.0
            job.deadline = time.monotonic() + self.scoring.timeout + grace
            try:
                worker.send((self._num_jobs, job.prompts, job.completions))
            except Exception as error:
                reason = f"a row cannot be sent to the process of a reward: {type(error).__name__}: {error}"
                job.future.set_exception(ScoringError("errors", reason))
            else:
                worker.jobs[self._num_jobs] = job

    def _wait(self) -> None:
        """Wait for the next answer, the next deadline or the next job."""
        busy = [worker for worker in self.workers if worker.jobs]
        deadlines = [job.deadline for worker in busy for job in worker.jobs.values()]
        timeout = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
        ready = wait([self._wake_receiver, *(worker.pipe for worker in self.workers)], timeout)
        if self._wake_receiver in ready:
            self._wake_receiver.recv_bytes()
            with self._lock:
                self._is_woken = False
        for worker in list(self.workers):
            if worker.pipe in ready:
                self._read_answer(worker)
            elif worker.jobs and time.monotonic() >= min(job.deadline for job in worker.jobs.values()):
                self._replace(
                    worker, "timeouts", f"a score took longer than {self.scoring.timeout:g} s (data.scoring.timeout)"
                )

    def _read_answer(self, worker: Worker) -> None:
        try:
            answer = json.loads(worker.pipe.recv_bytes(_MAX_ANSWER_BYTES))
        except (EOFError, OSError, ValueError):
            self._replace(worker, "crashes", "the process of a reward ended")
            return
        if "flood" in answer:
            self._replace(worker, "output", f"a score printed or wrote more than {self.scoring.output_mib:g} MiB")
            return
        job = worker.jobs.pop(answer["job"], None)
        if job is None:
            return
        if "scores" in answer:
            job.future.set_result(_scores(answer["scores"], answer["notes"]))
            return
        job.future.set_exception(ScoringError(answer["kind"], answer["error"], answer.get("notes")))
        if answer["kind"] == "memory":  # the next score would lack the memory it holds
            self._replace(worker, "memory", answer["error"])

    def _replace(self, worker: Worker, kind: Failure, reason: str) -> None:
        worker.kill()
        self.workers.remove(worker)
        jobs = list(worker.jobs.values())
        is_shared = len(jobs) > 1 or kind == "memory" or (kind == "crashes" and worker.is_orphan())
        if not is_shared or all(job.is_alone for job in jobs):
            for job in jobs:
                job.future.set_exception(ScoringError(kind, reason))
            return
        for job in jobs:  # any or none of them may be the cause: retry each in a worker for itself
            job.is_alone = True
        with self._lock:
            self._waiting.extendleft(reversed(jobs))


def _scores(values: Sequence[float | None], notes: Sequence[Notes | None]) -> list[Score]:
    """Return the scores in a worker's answer."""
    return [
        NOT_YET if value is None else float(value) if own is None else NotedScore(value, own)
        for value, own in zip(values, notes, strict=True)
    ]
