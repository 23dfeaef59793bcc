"""Episodes in worker processes, which are killed when they exceed a limit."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping
from concurrent.futures import Future
from typing import Any, final

from lgrpo.environments.base import Environment, Observation, Turn
from lgrpo.environments.episodes import EpisodeLimits, Episodes, Method, fail
from lgrpo.environments.pool import Call, EpisodePool


@final
class WorkerEpisodes(Episodes):
    """Runs episodes in worker processes with limits, one for each live episode. Thread-safe.

    If a reset or step hangs, crashes, raises, runs out of memory, prints or returns too much, or returns something that
    is not a ``Turn``, only its own episode fails. Processes are forked from one that has the environment loaded, which
    takes milliseconds and shares its memory. A process is reused for later episodes, unless its episode failed, left
    processes behind or took more than half of the memory. It is not a sandbox: it has your access rights.

    The first ``reset`` starts the processes, and ``close`` ends them.
    """

    def __init__(self, environment: Environment, limits: EpisodeLimits = EpisodeLimits()) -> None:  # noqa: B008
        """
        Args:
            environment: Environment to run. It is pickled by value, so its class may be defined in a notebook.
            limits: Limits of the processes.
        """
        self.environment = environment
        self.limits = limits
        self._pool: EpisodePool | None = None
        self._is_closed = False
        self._lock = threading.Lock()

    def reset(self, episode: Hashable, row: Mapping[str, Any]) -> Future[Observation | None]:
        return self._call(episode, "reset", dict(row))

    def step(self, episode: Hashable, text: str) -> Future[Turn]:
        return self._call(episode, "step", text)

    def truncate(self, episode: Hashable) -> Future[float]:
        return self._call(episode, "truncate")

    def end(self, episode: Hashable) -> None:
        with self._lock:
            pool = self._pool
        if pool is not None:
            pool.end(episode)

    def close(self) -> None:
        with self._lock:
            pool, self._pool = self._pool, None
            self._is_closed = True
        if pool is not None:
            pool.close()

    def _call(self, episode: Hashable, method: Method, *arguments: Any) -> Future[Any]:
        call = Call(episode, method, arguments)
        with self._lock:
            if self._is_closed or (self._pool is None and method != "reset"):
                fail(call.future, RuntimeError(f"episode {episode!r} has not been reset, or was closed"))
                return call.future
            if self._pool is None:
                from lightning.pytorch.utilities import rank_zero_info  # here, because workers import this module

                rank_zero_info(f"Starting processes for the episodes of {type(self.environment).__name__}.")
                self._pool = EpisodePool(self.environment, self.limits)
            self._pool.submit(call)
        return call.future
