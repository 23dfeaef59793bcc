"""Episodes in the trainer's process, without limits."""

from __future__ import annotations

import asyncio
import copy
import inspect
import threading
from collections.abc import Hashable, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, final

from lgrpo.environments.base import Environment, Observation, Turn
from lgrpo.environments.episodes import EpisodeFailure, Episodes, Method, checked, fail, succeed
from lgrpo.rewards.workers.loop import failed


@dataclass(slots=True, eq=False)
class _Episode:
    instance: Environment
    future: Future[Any] | None = None
    """Result of the last call."""
    failure: EpisodeFailure | None = None


@final
class LocalEpisodes(Episodes):
    """Runs episodes in threads of this process, for environments that always return quickly; and for tests.

    An async environment runs in an event loop, which all episodes share. Instances are deep copies.
    """

    def __init__(self, environment: Environment, num_threads: int = 8) -> None:
        """
        Args:
            environment: Environment to copy for each live episode.
            num_threads: Number of resets and steps that run at the same time. An async one counts until it first waits.
        """
        self.environment = environment
        self.num_threads = num_threads
        self._lock = threading.Lock()
        self._episodes: dict[Hashable, _Episode] = {}
        self._idle: list[Environment] = []
        self._threads: ThreadPoolExecutor | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def reset(self, episode: Hashable, row: Mapping[str, Any]) -> Future[Observation | None]:
        self.end(episode)
        with self._lock:
            instance = self._idle.pop() if self._idle else None
        state = _Episode(copy.deepcopy(self.environment) if instance is None else instance)
        with self._lock:
            self._episodes[episode] = state
        return self._call(state, "reset", row)

    def step(self, episode: Hashable, text: str) -> Future[Turn]:
        return self._call(self._episode(episode), "step", text)

    def truncate(self, episode: Hashable) -> Future[float]:
        return self._call(self._episode(episode), "truncate")

    def end(self, episode: Hashable) -> None:
        with self._lock:
            state = self._episodes.pop(episode, None)
            if state is None or state.future is None:
                return
            if state.future.done() and state.failure is None:  # otherwise the instance may still be in use
                self._idle.append(state.instance)
        state.future.cancel()

    def close(self) -> None:
        with self._lock:
            states, self._episodes, self._idle = list(self._episodes.values()), {}, []
            threads, self._threads = self._threads, None
            loop, self._loop = self._loop, None
        for state in states:
            if state.future is not None:
                state.future.cancel()
        if threads is not None:
            threads.shutdown(wait=False, cancel_futures=True)
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)

    def _episode(self, episode: Hashable) -> _Episode:
        with self._lock:
            if episode not in self._episodes:
                raise RuntimeError(f"episode {episode!r} has not been reset")
            return self._episodes[episode]

    def _call(self, state: _Episode, method: Method, *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            if state.future is not None and not state.future.done():
                raise RuntimeError("an episode was called before its last result was known")
            state.future = future
            if state.failure is None:
                if self._threads is None:
                    self._threads = ThreadPoolExecutor(self.num_threads, thread_name_prefix="environment")
                self._threads.submit(self._run, state, future, method, arguments)
        if state.failure is not None:
            fail(future, state.failure)
        return future

    # Below: in a thread or in the event loop.

    def _run(self, state: _Episode, future: Future[Any], method: Method, arguments: tuple[Any, ...]) -> None:
        try:
            value = getattr(state.instance, method)(*arguments)
            if inspect.isawaitable(value):
                awaited = asyncio.run_coroutine_threadsafe(_result(value), self._event_loop())
                future.add_done_callback(partial(_cancel_too, awaited))
                awaited.add_done_callback(partial(self._set_result, state, future, method))
                return
        except BaseException as error:
            self._set_failure(state, future, method, error)
            return
        self._set_value(state, future, method, value)

    def _set_result(self, state: _Episode, future: Future[Any], method: Method, awaited: Future[Any]) -> None:
        try:
            value = awaited.result()
        except (Exception, CancelledError) as error:
            self._set_failure(state, future, method, error)
            return
        self._set_value(state, future, method, value)

    def _set_value(self, state: _Episode, future: Future[Any], method: Method, value: object) -> None:
        try:
            value = checked(type(state.instance).__name__, method, value)
        except Exception as error:
            self._set_failure(state, future, method, error)
            return
        succeed(future, value)

    def _set_failure(self, state: _Episode, future: Future[Any], method: Method, error: BaseException) -> None:
        answer = failed(error)
        state.failure = EpisodeFailure(answer["kind"], answer["error"], method)
        fail(future, state.failure)

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_run_loop, args=(self._loop,), name="environment-loop", daemon=True).start()
            return self._loop


async def _result(value: Any) -> Any:
    return await value


async def _all_ended(tasks: set[asyncio.Task[Any]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)


def _cancel_too(awaited: Future[Any], future: Future[Any]) -> None:
    if future.cancelled():
        awaited.cancel()


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    loop.run_until_complete(_all_ended(tasks))
    loop.close()
