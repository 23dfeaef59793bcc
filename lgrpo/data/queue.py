"""Rollouts that are sampled and not yet trained on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from lgrpo.types import RolloutBatch


class RolloutQueue:
    """Rollouts by their index: ready ones, and those being sampled in the background, one batch after another."""

    def __init__(
        self, sample: Callable[[range], list[RolloutBatch]], sampled: Callable[[range], None], in_background: bool
    ) -> None:
        """
        Args:
            sample: Samples and scores the rollouts of a range.
            sampled: Told when they are in the queue, where an interrupt cannot lose them any more.
            in_background: In a thread, while the trainer goes on.
        """
        self._sample = sample
        self._sampled = sampled
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="rollouts") if in_background else None
        self._ready: dict[int, RolloutBatch] = {}
        self._pending: deque[tuple[range, Future[list[RolloutBatch]]]] = deque()
        self._has_failed = False

    def __contains__(self, rollout: int) -> bool:
        return rollout in self._ready or any(rollout in rollouts for rollouts, _ in self._pending)

    def ask(self, rollouts: range) -> None:
        """Has rollouts sampled: now, or in the background behind those that were asked for before."""
        if self._executor is None:
            self._keep(self._sample(rollouts))
            self._sampled(rollouts)
        else:
            self._has_failed &= bool(self._pending)
            self._pending.append((rollouts, self._executor.submit(self._in_background, rollouts)))

    def wait(self) -> None:
        """Until nothing is being sampled. An error of the sampling surfaces here."""
        while self._pending:
            self._wait_for_next()

    def get(self, rollout: int) -> RolloutBatch:
        """A rollout. It stays in the queue until ``drop``: what goes wrong before it is trained on does not lose it."""
        while rollout not in self._ready:
            self._wait_for_next()
        return self._ready[rollout]

    def ready(self) -> list[RolloutBatch]:
        """Those that are sampled, in order."""
        return [batch for _, batch in sorted(self._ready.items())]

    def drop(self, last: int) -> None:
        """Rollouts up to ``last`` are in other hands now."""
        self._ready = {k: batch for k, batch in self._ready.items() if k > last}

    def state_dict(self) -> list[dict[str, Any]]:
        """What is ready. What is being sampled is sampled again after a resume, from the same weights."""
        return [batch.state_dict() for batch in self.ready()]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        self._keep([RolloutBatch.from_state_dict(batch) for batch in state])

    def close(self) -> bool:
        """Stops the thread, without waiting for what it is at. Whether it is at something."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
        return any(not future.done() for _, future in self._pending)

    def _in_background(self, rollouts: range) -> list[RolloutBatch]:
        if self._has_failed:
            raise RuntimeError("rollouts before these could not be sampled")
        try:
            return self._sample(rollouts)
        except BaseException:
            self._has_failed = True
            raise

    def _wait_for_next(self) -> None:
        rollouts, future = self._pending[0]
        try:
            self._keep(future.result())
        except BaseException:
            if future.done():  # else it was the trainer that was interrupted: close() must know what goes on
                self._pending.clear()  # they wait for what did not come
            raise
        self._pending.popleft()
        self._sampled(rollouts)

    def _keep(self, batches: list[RolloutBatch]) -> None:
        self._ready |= {batch.rollout: batch for batch in batches}
