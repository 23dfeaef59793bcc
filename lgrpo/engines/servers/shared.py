"""One server group that several training ranks share."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from lgrpo.engines.base import EngineState
from lgrpo.engines.processes import has_other_ranks
from lgrpo.engines.recovery import RESUME_ADVICE, EngineError, EngineFailure
from lgrpo.engines.servers.client import VLLMServer
from lgrpo.engines.servers.group import ServedModel, ServerGroup, check_not_cancelled
from lgrpo.engines.servers.rank_zero import RankZeroChannel, Weights
from lgrpo.weights import PolicyWeights

_HEALTH_CHECK_PERIOD = 2.0
"""Seconds between two checks of the servers."""

Result = TypeVar("Result")


@dataclass(kw_only=True, frozen=True)
class SharedView:
    """State that rank 0 sends to the other ranks after each action. It has keys, so it is never written to disk."""

    servers: list[tuple[str, str | None, bool]]
    """URL, key and ``is_unavailable`` of each server."""
    model: ServedModel
    engine: EngineState


class SharedServers:
    """Access of all training ranks to the server group of rank 0.

    Rank 0 alone starts, syncs, checks and restarts servers: it runs each such action in ``lead`` while the other ranks
    call ``follow``, which returns rank 0's view. Then every rank sends its own prompts, inside ``used``; if a server
    fails, ``recover`` restarts it on rank 0 and waits for that on the others. A health check on rank 0 makes this work
    while rank 0 trains. With a single rank there is no channel, and the group is used directly.
    """

    def __init__(self, group: ServerGroup, engine_state: Callable[[], EngineState]) -> None:
        self.group = group
        self._engine_state = engine_state
        self._channel: RankZeroChannel[SharedView] | None = None
        self._is_leading = False
        self._in_use = threading.Lock()
        """Held on rank 0 while it samples, syncs, or runs a health check."""
        self._health_check: threading.Thread | None = None
        self._stopped = threading.Event()
        self._error: EngineError | None = None
        """Error of the health check, which the next use raises."""

    @property
    def is_follower(self) -> bool:
        """Whether the servers belong to another process."""
        return self._channel is not None and self._channel.rank > 0

    def connect(self) -> bool:
        """Connect all ranks the first time. Return whether an action needs ``lead`` and ``follow``.

        It does not if there is one rank, or inside another action.
        """
        if self._is_leading or not has_other_ranks():
            return False
        if self._channel is None:
            limits, budget = self.group.timeouts, self.group.budget
            restart = limits.start + limits.reconnect + 2 * limits.sync
            self._channel = RankZeroChannel(limits.generate + (budget.max_failures + 1) * restart)
            self.group.keeps_addresses = True
        return True

    def lead(self, act: Callable[[Weights], Result], weights: Weights) -> Result:
        """Run an action on rank 0 when no rank samples any more, and send the resulting view to the other ranks."""
        assert self._channel is not None
        with self.used():
            self._is_leading = True
            try:
                result = self._channel.lead(act, weights, self._view)
            finally:
                self._is_leading = False
        self._start_health_check()
        return result

    def follow(self, weights: PolicyWeights | None) -> EngineState:
        """Take part in an action of rank 0, adopt its view of the servers, and return the state of its engine."""
        assert self._channel is not None
        view = self._channel.follow(weights)
        known = {server.url for server in self.group.servers}
        self.group.servers = [VLLMServer(url, key) for url, key, _ in view.servers]
        for server, (*_, is_unavailable) in zip(self.group.servers, view.servers, strict=True):
            server.is_unavailable = is_unavailable
        for server in self.group.available:
            if server.url not in known:
                try:
                    server.wait_until_ready(min(30.0, self.group.timeouts.start))
                except EngineFailure as failure:
                    raise EngineError(
                        f"rank {self._channel.rank} on {socket.gethostname()} cannot reach the vLLM server at "
                        f"{server.url}, which rank 0 uses. Servers that lgrpo starts listen only on rank 0's machine: "
                        "for several machines start servers yourself and list them in urls"
                    ) from failure
        self.group.model = view.model
        return view.engine

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Suspend the health check while this rank samples or syncs. Raise its error if it could not recover."""
        with self._in_use:
            if self._error is not None:
                raise self._error
            yield

    def recover(self, server: VLLMServer, failure: EngineFailure, cancelled: threading.Event) -> VLLMServer | None:
        """Return a server in exchange for one that failed, or None, as ``ServerGroup.recover`` does.

        Ranks other than 0 wait until rank 0 has restarted it.
        """
        group, limits = self.group, self.group.timeouts
        if not self.is_follower:
            return group.recover(server, failure, cancelled)
        with group.counted_restart():
            group.budget.count_failure(failure)
            deadline = time.monotonic() + limits.start + limits.reconnect + limits.sync
            new = VLLMServer(server.url, server.api_key)
            while time.monotonic() < deadline:
                check_not_cancelled(cancelled)
                time.sleep(0.5)
                with contextlib.suppress(EngineFailure):
                    if new.is_up():
                        group.check_version(new, limits.sync)
                        group.exchange(server, new)
                        return new
        server.is_unavailable = True
        if not group.available:
            raise EngineError(
                f"{failure}. Rank 0 did not restart it in time, and no other server is available: {RESUME_ADVICE}"
            )
        return None

    def close(self) -> None:
        """Stop the health check. The group is closed separately."""
        self._stopped.set()

    def _view(self) -> SharedView:
        servers = [(server.url, server.api_key, server.is_unavailable) for server in self.group.servers]
        return SharedView(servers=servers, model=self.group.model, engine=self._engine_state())

    def _start_health_check(self) -> None:
        """Start checking the servers in a thread, because other ranks may sample while this one trains."""
        if self._health_check is None or not self._health_check.is_alive():
            self._stopped = threading.Event()
            self._health_check = threading.Thread(
                target=self._health_check_loop, args=(self._stopped,), name="vllm-health-check", daemon=True
            )
            self._health_check.start()

    def _health_check_loop(self, stopped: threading.Event) -> None:
        while not stopped.wait(_HEALTH_CHECK_PERIOD):
            if self._engine_state().step is None or not self._in_use.acquire(blocking=False):
                continue
            try:
                self.group.check_all()
            except EngineError as error:
                if not stopped.is_set():
                    self._error = error
                return
            finally:
                self._in_use.release()
