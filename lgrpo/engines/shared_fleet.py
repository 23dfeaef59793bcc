"""vLLM servers that several training processes share."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from lgrpo.engines.base import GO_ON, EngineError, EngineFailure, RolloutEngine, each
from lgrpo.engines.fleet import Fleet
from lgrpo.engines.ledger import Sent, SyncRecord
from lgrpo.engines.server import VLLMServer
from lgrpo.engines.together import Line
from lgrpo.engines.vllm_transfer import Failures
from lgrpo.types import PolicyWeights

_GUARD_PERIOD = 2.0
"""Seconds between two looks at the servers."""

Result = TypeVar("Result")


class SharedFleet(Fleet):
    """A fleet, where there are several ranks that of rank 0.

    Rank 0 alone starts, syncs, guards and replaces the servers; the others hear from it where they are, with which key
    and version, send their own prompts, and wait where a server fails.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._line: Line | None = None
        self._is_leading = False
        self._in_use = threading.Lock()
        """Held while rank 0 samples or syncs, or its guard looks after the servers."""
        self._guard: threading.Thread | None = None
        self._guard_ends = threading.Event()
        self._guard_error: EngineError | None = None

    def load_weights(self, weights: PolicyWeights, step: int, num_rollouts: int | None = None) -> SyncRecord:
        self._together(lambda own: RolloutEngine.load_weights(self, own or weights, step, num_rollouts), weights)
        return self.ledger[-1]

    def state_dict(self) -> dict[str, Any]:
        """The weights are in rank 0's."""
        return {"config": None, "weights": None} if self._follows else super().state_dict()

    def load_state_dict(self, state: dict[str, Any], policy: PolicyWeights | None = None) -> None:
        self._together(lambda own: RolloutEngine.load_state_dict(self, state, own or policy), policy)

    def _replace(self, weights: PolicyWeights, step: int, version: int) -> Sent:
        sent = self._together(lambda own: RolloutEngine._replace(self, own or weights, step, version), weights)
        return sent or Sent()

    def close(self) -> None:
        self._guard_ends.set()
        super().close()

    # Inside

    @property
    def _follows(self) -> bool:
        """Whether another process has the servers."""
        return self._line is not None and self._line.rank > 0

    @property
    def _deadline(self) -> float:
        """Seconds a rank may be busy sampling, and rank 0 with servers."""
        return self.timeout + (self.max_failures + 1) * (
            self.start_timeout + self.return_timeout + 2 * self.sync_timeout
        )

    def _together(self, act: Callable[[PolicyWeights | None], Result], weights: PolicyWeights | None) -> Result | None:
        """Has rank 0 change what the servers hold, once no rank samples any more; the others take over how they are.

        None on the others.
        """
        if self._is_leading or not Line.is_needed():
            return act(weights)
        if self._line is None:
            self._line = Line(self._deadline)
        if self._follows:
            self.forget()
            self._adopt(self._line.follow(weights))
            return None
        with self._used():
            self._is_leading = True
            try:
                result = self._line.lead(act, weights, self._outcome)
            finally:
                self._is_leading = False
        self._start_guard()
        return result

    def _outcome(self) -> dict[str, Any]:
        """What the other ranks need to know. It goes from process to process, never over a disk."""
        names = ("step", "version", "num_rollouts", "spent", "ledger", "_config", "_longest", "_is_seeded", "_model")
        return {
            "servers": [(server.url, server.api_key, server.is_given_up) for server in self.servers],
            "names": {name: getattr(self, name) for name in (*names, "_sent_version", "adapter_rank")},
        }

    def _adopt(self, outcome: dict[str, Any]) -> None:
        known = {server.url for server in self.servers}
        self.servers = [VLLMServer(url, key) for url, key, _ in outcome["servers"]]
        for server, (*_, is_given_up) in zip(self.servers, outcome["servers"], strict=True):
            server.is_given_up = is_given_up
        for server in self._present():
            if server.url not in known:
                try:
                    server.wait_until_ready(min(30.0, self.start_timeout))
                except EngineFailure as failure:
                    assert self._line is not None
                    raise EngineError(
                        f"rank {self._line.rank} on {socket.gethostname()} cannot reach the vLLM server at "
                        f"{server.url}, which rank 0 uses. Servers that lgrpo starts listen on rank 0's machine alone: "
                        "for several machines start them yourself, and name them in urls"
                    ) from failure
        for name, value in outcome["names"].items():
            setattr(self, name, value)

    @contextlib.contextmanager
    def _used(self) -> Iterator[None]:
        """Rank 0 samples or syncs: its guard stays away. What the guard could not mend is an error here."""
        with self._in_use:
            if self._guard_error is not None:
                raise self._guard_error
            yield

    def _start_guard(self) -> None:
        """Other ranks may sample while this one trains: somebody must look after the servers."""
        if self._guard is None or not self._guard.is_alive():
            self._guard_ends = threading.Event()
            self._guard = threading.Thread(
                target=self._stand_guard, args=(self._guard_ends,), name="vllm-guard", daemon=True
            )
            self._guard.start()

    def _stand_guard(self, ends: threading.Event) -> None:
        while not ends.wait(_GUARD_PERIOD):
            if self.step is None or not self._in_use.acquire(blocking=False):
                continue
            try:
                epoch, failures = self._epoch, Failures()
                self._settle()
                each(
                    self._present(),
                    failures,
                    lambda server: self._check_version(server, self._sent_version, self.sync_timeout),
                )
                self._recover_all(failures, epoch)
            except EngineError as error:
                if not ends.is_set():
                    self._guard_error = error
                return
            finally:
                self._in_use.release()

    def _bring_back(self, server: VLLMServer, failure: EngineFailure, epoch: int) -> VLLMServer | None:
        """On the others: the server that failed, once rank 0 has it up again with its weights."""
        if not self._follows:
            return super()._bring_back(server, failure, epoch)
        self._count(failure)
        deadline = time.monotonic() + self.start_timeout + self.return_timeout + self.sync_timeout
        new = VLLMServer(server.url, server.api_key)
        while time.monotonic() < deadline:
            self._check_epoch(epoch)
            time.sleep(0.5)
            with contextlib.suppress(EngineFailure):
                if new.is_up():
                    self._check_version(new, self._sent_version, self.sync_timeout)
                    self.servers[self.servers.index(server)] = new
                    self.faults["restarts"] += 1
                    return new
        server.is_given_up = True
        if not self._present():
            raise EngineError(f"{failure}. Rank 0 did not bring it back in time, and there is no other: {GO_ON}")
        return None
