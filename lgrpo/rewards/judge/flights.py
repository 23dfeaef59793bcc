"""Concurrent requests for the same thing, made once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")


class SingleFlight(Generic[_T]):
    """Runs work once for all tasks that ask for the same key at the same time, in one event loop.

    The work is cancelled when all of them are.
    """

    def __init__(self) -> None:
        self._tasks: dict[tuple[int, str], tuple[asyncio.Task[_T], set[object]]] = {}

    async def __call__(self, key: str, work: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Return the result of ``work``, or of the same work that is running for another task."""
        name = id(asyncio.get_running_loop()), key
        if name not in self._tasks:
            task = asyncio.create_task(work())
            task.add_done_callback(lambda task: self._forget(name, task))
            self._tasks[name] = task, set()
        task, waiting = self._tasks[name]
        own = object()
        waiting.add(own)
        try:
            return await asyncio.shield(task)
        finally:
            waiting.discard(own)
            if not waiting:
                task.cancel()  # nothing happens if it is done
                self._forget(name, task)  # it takes a while to end, in which others may ask

    def _forget(self, name: tuple[int, str], task: asyncio.Task[_T]) -> None:
        if name in self._tasks and self._tasks[name][0] is task:
            del self._tasks[name]
