"""Pool of worker processes, each with one live episode."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import math
import os
import pickle
import selectors
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing import Pipe
from typing import Any, get_args

from lgrpo.environments.base import Environment
from lgrpo.environments.channel import Channel
from lgrpo.environments.episode_loop import EpisodeLoop
from lgrpo.environments.episodes import EpisodeFailure, EpisodeLimits, Method, decoded, fail, succeed
from lgrpo.rewards.base import Failure
from lgrpo.rewards.workers.fork_server import ForkServer

_ANSWER_BYTES = 2**16  # of an answer in addition to its observation


@dataclass(slots=True, eq=False)
class Call:
    """Call of a method of an environment."""

    episode: Hashable
    method: Method
    arguments: tuple[Any, ...]
    future: Future[Any] = field(default_factory=Future)
    number: int = 0
    """Number that its answer has; 0 before it is sent."""
    deadline: float = math.inf
    needs_new_worker: bool = False


@dataclass(slots=True, eq=False)
class LiveEpisode:
    """Episode that has begun and not ended: its worker, and its unfinished call."""

    worker: Worker | None = None
    call: Call | None = None
    """Call whose result is not known yet."""
    failure: EpisodeFailure | None = None


@dataclass(slots=True, eq=False)
class Worker:
    """Process with an instance of the environment."""

    pid: int
    """Process id of its supervisor, which ends the worker and all processes that the worker started."""
    channel: Channel
    fork_server: subprocess.Popen
    """Process it was forked from."""
    episode: LiveEpisode | None = None
    is_new: bool = True
    """Whether it has run no episode before this one."""
    is_reusable: bool = False

    def reason_of_end(self, name: str, during: str) -> str:
        if self.fork_server.poll() is not None:
            return f"the process that starts the processes of {name} was killed"
        return f"the process of {name} ended {during}"


class EnvironmentForkServer(ForkServer):
    """Process that has an environment loaded."""

    kind = "environment"
    setting = "data.engine.limits"


class EpisodePool:
    """Calls environments in worker processes, for callers in any number of threads.

    ``submit`` sets the future of a call. One thread of the pool forks workers, sends calls, reads answers, and kills
    workers that failed. ``close`` ends the processes; calls without a result raise an error.
    """

    def __init__(self, environment: Environment, limits: EpisodeLimits) -> None:
        self.name = type(environment).__name__
        self.limits = limits
        self.fork_server = EnvironmentForkServer(environment, EpisodeLoop, limits)
        self.episodes: dict[Hashable, LiveEpisode] = {}
        self.idle: list[Worker] = []
        """Workers without an episode, to be reused."""
        self._max_answer = int(limits.output_mib * 2**20) + _ANSWER_BYTES
        self._numbers = itertools.count(1)
        self._waiting: deque[Call] = deque()
        self._running: dict[int, Call] = {}
        """Calls that were sent, by number."""
        self._slots: set[int] = set()
        """Numbers of the running calls that count towards ``num_workers``."""
        self._inbox: deque[Call | Hashable] = deque()
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._is_closing = self._is_woken = False
        self._wake_receiver, self._wake_sender = Pipe(duplex=False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_receiver, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="environment-workers", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def submit(self, call: Call) -> None:
        """Make a call. Its future raises an ``EpisodeFailure`` if the episode fails."""
        with self._lock:
            if self._error is None:
                self._inbox.append(call)
                self._wake()
                return
        fail(call.future, self._error)

    def end(self, episode: Hashable) -> None:
        """Free the worker of an episode."""
        with self._lock:
            self._inbox.append(episode)
            if self._error is None:
                self._wake()

    def close(self) -> None:
        """End the processes."""
        with self._lock:
            if not self._is_closing:
                self._is_closing = True
                self._wake()
        if threading.current_thread() is not self._thread:  # as in a callback of a future
            self._thread.join()
        atexit.unregister(self.close)

    def _wake(self) -> None:
        """Wake the thread; requires the lock. One message at most is sent, because a full pipe would block."""
        if not self._is_woken:
            self._is_woken = True
            self._wake_sender.send_bytes(b".")

    # Below: in the pool's thread.

    def _run(self) -> None:
        error: BaseException = RuntimeError(f"the episodes of {self.name} are closed")
        try:
            while not self._is_closing:
                self._accept()
                self._send_waiting()
                self._wait()
        except BaseException as reason:
            error = reason
        with self._lock:
            self._is_closing, self._error = True, error
            unread = [call for call in self._inbox if isinstance(call, Call)]
        for call in [*unread, *(e.call for e in self.episodes.values() if e.call is not None)]:
            fail(call.future, error)
        for worker in [*self.idle, *(e.worker for e in self.episodes.values() if e.worker is not None)]:
            self._kill(worker)
        self.fork_server.close()
        self._selector.close()

    def _accept(self) -> None:
        """Take the calls and the ends of episodes that other threads submitted, in order."""
        with self._lock:
            inbox, self._inbox = self._inbox, deque()
        for message in inbox:
            if not isinstance(message, Call):
                self._end(message)
                continue
            if message.method == "reset":
                self._end(message.episode)
                self.episodes[message.episode] = LiveEpisode()
            episode = self.episodes.get(message.episode)
            if episode is None:
                fail(message.future, RuntimeError(f"episode {message.episode!r} has not been reset"))
            elif episode.call is not None:
                fail(message.future, RuntimeError("an episode was called before its last result was known"))
            elif episode.failure is not None:
                fail(message.future, episode.failure)
            else:
                episode.call = message
                self._waiting.append(message)

    def _end(self, name: Hashable) -> None:
        episode = self.episodes.pop(name, None)
        if episode is None:
            return
        worker, call = episode.worker, episode.call
        is_free = call is None or not call.number
        if call is not None:
            self._forget(call)
            call.future.cancel()
        has_place = len(self.idle) < self.limits.max_idle
        if worker is not None and worker.is_reusable and is_free and has_place and episode.failure is None:
            worker.episode, worker.is_new = None, False
            self.idle.append(worker)
        elif worker is not None:
            self._kill(worker)

    def _send_waiting(self) -> None:
        """Send calls that wait, up to ``num_workers`` at the same time."""
        while self._waiting and len(self._slots) < self.limits.num_workers:
            call = self._waiting.popleft()
            episode = self.episodes[call.episode]
            call.number = next(self._numbers)
            try:
                request = pickle.dumps((call.number, call.method, call.arguments))
            except Exception as error:
                reason = f"the row cannot be sent to another process ({type(error).__name__}: {error})"
                self._fail(episode, "errors", reason)
                continue
            if episode.worker is None:
                episode.worker = self._new_worker() if call.needs_new_worker or not self.idle else self.idle.pop()
                episode.worker.episode = episode
            call.deadline = time.monotonic() + self.limits.timeout
            self._running[call.number] = call
            self._slots.add(call.number)
            if not episode.worker.channel.send(request):
                self._watch(episode.worker, selectors.EVENT_READ | selectors.EVENT_WRITE)

    def _new_worker(self) -> Worker:
        pid, pipe, server = self.fork_server.fork_worker()
        worker = Worker(pid, Channel(pipe, self._max_answer), server)
        self._selector.register(worker.channel, selectors.EVENT_READ, worker)
        return worker

    def _watch(self, worker: Worker, events: int) -> None:
        self._selector.modify(worker.channel, events, worker)

    def _wait(self) -> None:
        """Wait for the next answer, the next deadline or the next message of another thread."""
        first = min((call.deadline for call in self._running.values()), default=math.inf)
        ready = self._selector.select(None if first == math.inf else max(0.0, first - time.monotonic()))
        for key, events in ready:
            if key.data is None:
                self._wake_receiver.recv_bytes()
                with self._lock:
                    self._is_woken = False
                continue
            if events & selectors.EVENT_WRITE and key.data.channel.flush():
                self._watch(key.data, selectors.EVENT_READ)
            if events & selectors.EVENT_READ:
                self._read(key.data)
        now = time.monotonic()
        for call in [call for call in self._running.values() if call.deadline <= now]:
            reason = f"a {call.method} took longer than {self.limits.timeout:g} s"
            self._fail(self.episodes[call.episode], "timeouts", reason)

    def _read(self, worker: Worker) -> None:
        """Read the answers of a worker."""
        call = None if worker.episode is None else worker.episode.call
        during = "between two steps" if call is None else f"during a {call.method}"
        try:
            answers = [json.loads(message) for message in worker.channel.read()]
            for answer in answers:
                self._take_answer(worker, answer)
        except EOFError:
            self._lose(worker, "crashes", worker.reason_of_end(self.name, during))
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError):  # it wrote to the pipe by itself
            self._lose(worker, "crashes", f"the process of {self.name} sent something that is not an answer")

    def _take_answer(self, worker: Worker, answer: dict[str, Any]) -> None:
        if answer.get("flood"):
            self._lose(worker, "output", f"{self.name} printed or wrote more than {self.limits.output_mib:g} MiB")
            return
        episode, call = worker.episode, self._running[answer["call"]]
        if episode is None or episode.call is not call:
            raise ValueError
        if answer.get("waiting"):
            self._slots.discard(call.number)
        elif "value" in answer:
            value = decoded(self.name, call.method, answer["value"])
            worker.is_reusable = answer["reusable"] is True
            episode.call = None
            self._forget(call)
            succeed(call.future, value)
        else:
            kind: Failure = answer["kind"] if answer["kind"] in get_args(Failure) else "errors"
            self._fail(episode, kind, str(answer["error"]))

    def _lose(self, worker: Worker, kind: Failure, reason: str) -> None:
        """Remove a worker that has ended, or must end."""
        if worker.episode is not None:
            self._fail(worker.episode, kind, reason)
        elif worker in self.idle:
            self.idle.remove(worker)
            self._kill(worker)

    def _fail(self, episode: LiveEpisode, kind: Failure, reason: str) -> None:
        """End an episode with a failure; but repeat a reset in a new process if its process had earlier episodes."""
        worker, call = episode.worker, episode.call
        episode.worker = None
        if worker is not None:
            self._kill(worker)
        if call is not None:
            self._forget(call)
        if call is not None and call.method == "reset" and worker is not None and not worker.is_new:
            call.needs_new_worker, call.number = True, 0
            self._waiting.appendleft(call)
            return
        episode.call, episode.failure = None, EpisodeFailure(kind, reason, "step" if call is None else call.method)
        if call is not None:
            fail(call.future, episode.failure)

    def _forget(self, call: Call) -> None:
        """Remove a call from those that wait or run."""
        self._slots.discard(call.number)
        if self._running.pop(call.number, None) is None:
            with contextlib.suppress(ValueError):
                self._waiting.remove(call)

    def _kill(self, worker: Worker) -> None:
        worker.episode = None
        self._selector.unregister(worker.channel)
        worker.channel.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(worker.pid, signal.SIGTERM)
