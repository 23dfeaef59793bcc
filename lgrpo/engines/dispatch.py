"""Prompts handed to whichever server is free, and to another one where it fails."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from lgrpo.engines.base import EngineError, EngineFailure

Server = TypeVar("Server")
Answer = TypeVar("Answer")


class Dispatch(Generic[Server, Answer]):
    """One generation: prompts, by their place, and servers that work them off.

    Each server has a keeper, a thread that looks after it and has it replaced when it fails, and threads that each take
    a prompt and wait for its answer. An answer counts once, and only from a server that is still in: what comes late
    from one that was given up is dropped. Threads are daemons: no hung server keeps the process from ending.
    """

    def __init__(
        self,
        num_prompts: int,
        *,
        ask: Callable[[Server, int], Answer],
        check: Callable[[Server], None],
        replace: Callable[[Server, EngineFailure], Server | None],
        at_a_time: int,
        period: float,
        timeout: float,
    ) -> None:
        """
        Args:
            num_prompts: How many there are.
            ask: Has a server answer a prompt. An ``EngineFailure`` is the server's fault; any other error ends all.
            check: Whether a server lives; an ``EngineFailure`` where it does not.
            replace: Puts a server that works in the place of one that failed, or None where the others must do.
            at_a_time: Prompts in flight at a server.
            period: Seconds between two checks.
            timeout: Seconds all of it may take; a replacement starts them anew.
        """
        self._ask = ask
        self._check = check
        self._replace = replace
        self._num_threads = min(at_a_time, num_prompts)
        self._period = period
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        """For the generation itself and the keepers."""
        self._freed = threading.Condition(lock)
        """For threads that wait for a prompt: many, so they are woken only when prompts come back, or at the end."""
        self._todo = deque(range(num_prompts))
        self._num_left = num_prompts
        self._untold: deque[tuple[int, Answer]] = deque()
        self._in_flight: dict[Server, set[int]] = {}
        self._failures: dict[Server, EngineFailure] = {}
        self._num_replacing = 0
        self._error: BaseException | None = None
        self._is_over = False

    def run(self, servers: Sequence[Server], tell: Callable[[int, Answer], None]) -> None:
        """Until every prompt is answered. Each answer is told once, in this thread.

        A server that is being replaced by then is not waited for.
        """
        num_prompts = self._num_left
        self._in_flight = {server: set() for server in servers}
        try:
            for server in servers:
                self._spawn(self._keep, server)
            while True:
                with self._changed:
                    while not (self._untold or self._error or self._num_left == 0):
                        if self._num_replacing == 0 and time.monotonic() >= self._deadline:  # replacing has its own
                            raise EngineError(
                                f"{self._num_left} of {num_prompts} prompts were unanswered after {self._timeout:g} s"
                            )
                        self._changed.wait(max(0.1, self._deadline - time.monotonic()))
                    if not self._untold:
                        if self._num_left == 0:
                            return
                        assert self._error is not None
                        raise self._error
                    place, answer = self._untold.popleft()
                tell(place, answer)
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()
                self._freed.notify_all()

    # A server's keeper

    def _keep(self, server: Server) -> None:
        """Stays with a server, and with those that replace it, to the end."""
        current: Server | None = server
        try:
            while current is not None and (failure := self._attend(current)) is not None:
                current = self._exchange(current, failure)
        except BaseException as error:
            self._stop(error)

    def _attend(self, server: Server) -> EngineFailure | None:
        """Lets a server work. What it failed of, or None where everything is answered."""
        try:
            self._check(server)
            for _ in range(self._num_threads):
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
        """What a failed server had in flight goes back to the others while another takes its place."""
        with self._changed:
            if self._is_over:
                return None
            self._todo.extendleft(sorted(self._in_flight.pop(server), reverse=True))
            self._num_replacing += 1
            self._freed.notify_all()
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

    # A prompt's thread

    def _work(self, server: Server) -> None:
        while (place := self._take(server)) is not None:
            try:
                answer = self._ask(server, place)
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
                if place in self._in_flight.get(server, ()):
                    self._in_flight[server].remove(place)
                    self._num_left -= 1
                    self._untold.append((place, answer))
                self._changed.notify_all()

    def _take(self, server: Server) -> int | None:
        """The next prompt for this server, once it has fewer in flight than its share; None where it is done."""
        with self._changed:
            while not self._is_over and server in self._in_flight:
                if self._todo and len(self._in_flight[server]) * len(self._in_flight) < self._num_left:
                    place = self._todo.popleft()
                    self._in_flight[server].add(place)
                    return place
                self._freed.wait()
        return None

    def _stop(self, error: BaseException) -> None:
        """The generation raises what a thread met."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    @staticmethod
    def _spawn(function: Callable[..., Any], server: Any) -> None:
        threading.Thread(target=function, args=(server,), name=f"engine-{function.__name__}", daemon=True).start()
