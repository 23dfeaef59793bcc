"""A reward in processes of its own, which are killed when they take too long or too much."""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import final

import dill

from lgrpo.rewards.base import BatchReward
from lgrpo.types import Completion, Prompt

_LONGEST_ANSWER = 4096  # bytes


@dataclass(slots=True)
class Worker:
    """A process that scores one completion at a time."""

    pid: int
    pipe: Connection
    index: int | None = None
    """Completion it is at."""
    deadline: float = math.inf

    def kill(self) -> None:
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(self.pid, signal.SIGKILL)
        self.pipe.close()


@final
class Isolated(BatchReward):
    """Another reward, each completion by itself, in worker processes with limits.

    One that hangs, crashes, raises, runs out of memory or answers with something that is not a finite number costs its
    own completion only: that one gets ``failure_score`` and is counted (``reward/failures``, ``reward/timeouts``, …).
    What a worker prints is dropped. A worker is not a sandbox: it can read what you can.
    """

    def __init__(
        self,
        reward: BatchReward,
        num_workers: int = 2,
        timeout: float = 10.0,
        memory_gib: float = 2.0,
        failure_score: float = 0.0,
    ) -> None:
        """
        Args:
            reward: What scores; it is pickled once, so it may live in a notebook.
            num_workers: Processes.
            timeout: Seconds a completion may take before its worker is killed and replaced.
            memory_gib: Memory a worker may take beyond what it starts with.
            failure_score: Reward of a completion whose scoring failed.
        """
        if num_workers < 1:
            raise ValueError(f"num_workers is {num_workers}; at least 1 is needed")
        if not timeout > 0:
            raise ValueError(f"timeout is {timeout}; it must be above 0")
        if not memory_gib > 0:
            raise ValueError(f"memory_gib is {memory_gib}; it must be above 0")
        if not math.isfinite(failure_score):
            raise ValueError(f"failure_score is {failure_score}; a reward is a finite number")
        self.reward = reward
        self.num_workers = num_workers
        self.timeout = timeout
        self.memory_gib = memory_gib
        self.failure_score = failure_score
        self.last_error = ""
        self._nursery: subprocess.Popen | None = None
        self._channel: socket.socket | None = None
        self._workers: list[Worker] = []
        self._failures: Counter[str] = Counter()

    def required_fields(self) -> set[str]:
        return self.reward.required_fields()

    def report(self) -> dict[str, float]:
        counts, self._failures = self._failures, Counter()
        kinds = ("timeouts", "crashes", "errors")
        return {"reward/failures": float(counts.total())} | {f"reward/{kind}": float(counts[kind]) for kind in kinds}

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[float]:
        scores = [self.failure_score] * len(completions)
        waiting = deque(range(len(completions)))
        while len(self._workers) < min(self.num_workers, len(completions)):
            self._workers.append(self._hire())
        while waiting or any(worker.index is not None for worker in self._workers):
            for worker in self._workers:
                if worker.index is None and waiting:
                    self._assign(worker, waiting.popleft(), prompts, completions)
            busy = [worker for worker in self._workers if worker.index is not None]
            patience = max(0.0, min(worker.deadline for worker in busy) - time.monotonic())
            ready = wait([worker.pipe for worker in busy], patience)
            for worker in busy:
                if worker.pipe in ready:
                    self._hear(worker, scores)
                elif time.monotonic() >= worker.deadline:
                    self._fail("timeouts", f"a score took longer than {self.timeout:g} s")
                    self._replace(worker)
        return scores

    def close(self) -> None:
        """Ends the processes. The next call starts them again."""
        for worker in self._workers:
            worker.kill()
        self._workers = []
        if self._nursery is not None and self._channel is not None:
            self._channel.close()
            self._nursery.kill()
            self._nursery.wait()
        self._nursery, self._channel = None, None
        atexit.unregister(self.close)

    def __getstate__(self) -> dict[str, object]:
        """Without its processes."""
        return self.__dict__ | {"_nursery": None, "_channel": None, "_workers": []}

    def _assign(self, worker: Worker, index: int, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> None:
        worker.index, worker.deadline = index, time.monotonic() + self.timeout
        with contextlib.suppress(OSError):  # it died in between: its pipe tells
            worker.pipe.send((prompts[index], completions[index]))

    def _hear(self, worker: Worker, scores: list[float]) -> None:
        assert worker.index is not None
        try:
            answer = json.loads(worker.pipe.recv_bytes(_LONGEST_ANSWER))
        except (EOFError, OSError, ValueError):
            self._fail("crashes", "the process of a reward ended")
            self._replace(worker)
            return
        if "score" in answer:
            scores[worker.index] = float(answer["score"])
        else:
            self._fail("errors", answer["error"])
        worker.index, worker.deadline = None, math.inf

    def _fail(self, kind: str, why: str) -> None:
        self._failures[kind] += 1
        self.last_error = why

    def _replace(self, worker: Worker) -> None:
        worker.kill()
        self._workers[self._workers.index(worker)] = self._hire()

    def _hire(self) -> Worker:
        """A worker, forked from a process that has the reward loaded."""
        if self._channel is None:
            self._open_nursery()
        assert self._channel is not None
        own, theirs = Pipe()
        try:
            socket.send_fds(self._channel, [b"w"], [theirs.fileno()])
            answer = self._channel.recv(32)
        except OSError as error:
            raise RuntimeError("the process that starts reward workers is gone") from error
        theirs.close()
        if not answer:
            raise RuntimeError("the process that starts reward workers is gone")
        return Worker(int(answer), own)

    def _open_nursery(self) -> None:
        own, theirs = socket.socketpair()
        command = [sys.executable, "-m", "lgrpo.rewards.nursery", str(theirs.fileno())]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        self._nursery = subprocess.Popen(
            command,
            env=environment,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        theirs.close()
        atexit.register(self.close)
        pickled = dill.dumps(self.reward)
        own.settimeout(120)
        try:
            own.sendall(json.dumps([len(pickled), int(self.memory_gib * 2**30)]).encode())
            own.recv(1)
            own.sendall(pickled)
            answer = own.recv(1024).decode()
        except OSError as error:
            raise RuntimeError("the process that starts reward workers did not answer") from error
        if answer != "k":
            name = type(self.reward).__name__
            raise RuntimeError(f"{name} cannot be loaded in another process: {answer or 'it ended'}")
        own.settimeout(None)
        self._channel = own
