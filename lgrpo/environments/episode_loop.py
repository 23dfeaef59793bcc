"""Main loop of the worker process of an episode."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
from collections.abc import Awaitable
from typing import Any

from lgrpo.environments.episodes import Method, checked
from lgrpo.rewards.workers.loop import WorkerLoop, address_space, failed
from lgrpo.rewards.workers.supervisor import adopt_orphans


class EpisodeLoop(WorkerLoop):
    """Calls the methods of the environment that the fork server has loaded, as its pipe requests them."""

    _loop: asyncio.AbstractEventLoop | None = None
    _max_memory = 0

    def run(self, memory: int, output: int) -> None:
        adopt_orphans()  # processes that an episode leaves behind become children of this one
        self._max_memory = address_space() + memory // 2
        super().run(memory, output)

    def serve(self) -> None:
        while True:
            self._wait()
            call, method, arguments = self.pipe.recv()
            try:
                answer = self._result(call, method, arguments)
            except Exception as error:
                answer = failed(error)
            self.answer({"call": call, "reusable": self._is_reusable()} | answer)

    def _wait(self) -> None:
        """Wait for a request. Tasks of an async environment, such as keeping a connection alive, continue to run."""
        if self._loop is not None:
            has_request = asyncio.Event()
            self._loop.add_reader(self.pipe.fileno(), has_request.set)
            self._loop.run_until_complete(has_request.wait())
            self._loop.remove_reader(self.pipe.fileno())

    def _result(self, call: int, method: Method, arguments: tuple[Any, ...]) -> dict[str, Any]:
        value = getattr(self.served, method)(*arguments)
        if inspect.isawaitable(value):
            self.answer({"call": call, "waiting": True})
            value = self._awaited(value)
        answer = {"value": checked(type(self.served).__name__, method, value)}
        if len(json.dumps(answer)) > self.max_output:
            limit = f"{self.max_output / 2**20:g} MiB"
            return {"kind": "output", "error": f"a {method} returned an observation of more than {limit}"}
        return answer

    def _awaited(self, value: Awaitable[Any]) -> Any:
        async def result() -> Any:
            return await value

        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(result())

    def _is_reusable(self) -> bool:
        """Return whether another episode may use this process: no process was left behind, and memory is left."""
        if address_space() > self._max_memory:
            return False
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # there is none
            return True
        return False
