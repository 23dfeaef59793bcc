"""Distribution of prompts over servers, with retries when a server fails."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from lgrpo.engines.recovery import EngineError, EngineFailure

Server = TypeVar("Server")
Answer = TypeVar("Answer")


class LoadBalancer(Generic[Server, Answer]):
    """One generation: prompts, identified by index, and the servers that answer them.

    Each server has a supervisor thread, which checks it and replaces it when it fails, and worker threads, which each
    take a prompt and wait for its answer. Each prompt is answered once, and only by a server that is still in use: a
    late answer of a replaced server is dropped. All threads are daemons, so a hung server cannot block the exit.
    """

    def __init__(
        self,
        num_prompts: int,
        *,
        ask: Callable[[Server, int], Answer],
        check: Callable[[Server], None],
        replace: Callable[[Server, EngineFailure], Server | None],
        max_in_flight: int,
        period: float,
        timeout: float,
    ) -> None:
        """
        Args:
            num_prompts: Number of prompts.
            ask: Returns a server's answer to the prompt at an index. An ``EngineFailure`` is a failure of the server;
                any other error ends the generation.
            check: Raises an ``EngineFailure`` if a server does not respond.
            replace: Returns a working server in exchange for a failed one, or None to continue with the others.
            max_in_flight: Upper limit of the prompts in flight at each server.
            period: Seconds between two checks of a server.
            timeout: Seconds the generation may take. A replacement restarts the clock.
        """
        self._ask = ask
        self._check = check
        self._replace = replace
        self._num_workers = min(max_in_flight, num_prompts)
        self._period = period
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        """Notifies the calling thread and the supervisors."""
        self._returned = threading.Condition(lock)
        """Notifies the many workers that wait for a prompt: only when prompts were returned, or at the end."""
        self._todo = deque(range(num_prompts))
        self._num_unanswered = num_prompts
        self._undelivered: deque[tuple[int, Answer]] = deque()
        self._in_flight: dict[Server, set[int]] = {}
        self._failures: dict[Server, EngineFailure] = {}
        self._num_replacing = 0
        self._error: BaseException | None = None
        self._is_over = False

    def run(self, servers: Sequence[Server], deliver: Callable[[int, Answer], None]) -> None:
        """Have every prompt answered and call ``deliver`` once for each answer, in this thread.

        Returns without waiting for servers that are still being replaced.
        """
        num_prompts = self._num_unanswered
        self._in_flight = {server: set() for server in servers}
        try:
            for server in servers:
                self._spawn(self._supervise, server)
            while True:
                with self._changed:
                    while not (self._undelivered or self._error or self._num_unanswered == 0):
                        # A replacement has its own time limit.
                        if self._num_replacing == 0 and time.monotonic() >= self._deadline:
                            raise EngineError(
                                f"{self._num_unanswered} of {num_prompts} prompts were unanswered after "
                                f"{self._timeout:g} s"
                            )
                        self._changed.wait(max(0.1, self._deadline - time.monotonic()))
                    if not self._undelivered:
                        if self._num_unanswered == 0:
                            return
                        assert self._error is not None
                        raise self._error
                    index, answer = self._undelivered.popleft()
                deliver(index, answer)
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()
                self._returned.notify_all()

    # Supervisor thread of a server

    def _supervise(self, server: Server) -> None:
        """Serve with one server and its replacements until the end."""
        current: Server | None = server
        try:
            while current is not None and (failure := self._serve(current)) is not None:
                current = self._exchange(current, failure)
        except BaseException as error:
            self._stop(error)

    def _serve(self, server: Server) -> EngineFailure | None:
        """Let a server answer prompts and check it. Return its failure, or None at the end."""
        try:
            self._check(server)
            for _ in range(self._num_workers):
                self._spawn(self._work, server)
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._is_over or server in self._failures, self._period)
                    if self._is_over:
                        return None
                    if server in self._failures:
                        return self._failures.pop(server)
                self._check(server)
        except EngineFailure as failure:
            return failure

    def _exchange(self, server: Server, failure: EngineFailure) -> Server | None:
        """Return the prompts of a failed server to the queue and replace the server."""
        with self._changed:
            if self._is_over:
                return None
            self._todo.extendleft(sorted(self._in_flight.pop(server), reverse=True))
            self._num_replacing += 1
            self._returned.notify_all()
        new = None
        try:
            new = self._replace(server, failure)
        finally:
            with self._changed:
                self._num_replacing -= 1
                self._deadline = time.monotonic() + self._timeout
                if new is not None:
                    self._in_flight[new] = set()
                self._changed.notify_all()
        return new

    # Worker threads of a server

    def _work(self, server: Server) -> None:
        while (index := self._take(server)) is not None:
            try:
                answer = self._ask(server, index)
            except EngineFailure as failure:
                with self._changed:
                    if server in self._in_flight:
                        self._failures.setdefault(server, failure)
                    self._changed.notify_all()
                return
            except BaseException as error:
                if server in self._in_flight:
                    self._stop(error)
                return
            with self._changed:
                if index in self._in_flight.get(server, ()):
                    self._in_flight[server].remove(index)
                    self._num_unanswered -= 1
                    self._undelivered.append((index, answer))
                self._changed.notify_all()

    def _take(self, server: Server) -> int | None:
        """Return the next prompt when the server has less than its share in flight; None when the server is done."""
        with self._changed:
            while not self._is_over and server in self._in_flight:
                if self._todo and len(self._in_flight[server]) * len(self._in_flight) < self._num_unanswered:
                    index = self._todo.popleft()
                    self._in_flight[server].add(index)
                    return index
                self._returned.wait()
        return None

    def _stop(self, error: BaseException) -> None:
        """Make ``run`` raise an error of another thread."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    @staticmethod
    def _spawn(function: Callable[..., Any], server: Any) -> None:
        threading.Thread(target=function, args=(server,), name=f"engine-{function.__name__}", daemon=True).start()
