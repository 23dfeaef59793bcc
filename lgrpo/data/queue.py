"""Sampled rollouts that wait to be trained on. They are sampled in a thread if sampling overlaps with training."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeAlias

import torch

from lgrpo.types import RolloutBatch

Sample: TypeAlias = Callable[[range, Callable[[RolloutBatch], None]], None]
"""Function that samples and scores a range of rollouts, and passes them on in order."""


class RolloutQueue:
    """Sampled rollouts by index, and requests being sampled in the background, one after another.

    A request delivers its rollouts in order, so that the first can be taken while later ones are being sampled.
    """

    def __init__(self, sample: Sample, on_sampled: Callable[[range], None], in_background: bool) -> None:
        """
        Args:
            sample: Function that samples and scores a range of rollouts, and passes them on.
            on_sampled: Function called when all of them are in the queue, where an interrupt cannot lose them.
            in_background: Whether to sample in a thread while the trainer continues.
        """
        self._sample = sample
        self._on_sampled = on_sampled
        self._executor = ThreadPoolExecutor(1, "rollouts", same_device()) if in_background else None
        self._changed = threading.Condition()
        """Held to read or write ``_ready``; notified when a rollout is delivered or a request ends."""
        self._ready: dict[int, RolloutBatch] = {}
        self._pending: deque[tuple[range, Future[None]]] = deque()
        self._has_failed = False

    def __contains__(self, rollout: int) -> bool:
        with self._changed:
            is_ready = rollout in self._ready
        return is_ready or any(rollout in rollouts for rollouts, _ in self._pending)

    @property
    def end(self) -> int:
        """First rollout after all that are sampled or requested; 0 if there are none."""
        with self._changed:
            ends = [rollout + 1 for rollout in self._ready]
        return max([*ends, *(rollouts.stop for rollouts, _ in self._pending)], default=0)

    def request(self, rollouts: range) -> None:
        """Sample rollouts: now, or in the background after earlier requests."""
        if self._executor is None:
            self._sample(rollouts, self._add)
            self._on_sampled(rollouts)
        else:
            self._has_failed &= bool(self._pending)
            self._pending.append((rollouts, self._executor.submit(self._sample_in_background, rollouts)))
            self._pending[-1][1].add_done_callback(self._notify)

    def wait(self) -> None:
        """Wait until nothing is being sampled; raise the error of a sampling that failed."""
        while self._pending:
            self._finish_first()

    def get(self, rollout: int) -> RolloutBatch:
        """Return a rollout, which stays in the queue until ``drop``: an error before its training does not lose it."""
        while True:
            self.collect()
            with self._changed:
                if rollout in self._ready:
                    return self._ready[rollout]
                if not self._pending:
                    raise KeyError(f"rollout {rollout} was not requested")
                if not self._pending[0][1].done():
                    self._changed.wait()

    def ready(self) -> list[RolloutBatch]:
        """Return the sampled rollouts in order."""
        with self._changed:
            return [batch for _, batch in sorted(self._ready.items())]

    def drop(self, last: int) -> None:
        """Remove the rollouts up to ``last``."""
        with self._changed:
            self._ready = {k: batch for k, batch in self._ready.items() if k > last}

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the sampled rollouts. Pending ones are sampled again after a resume, from the same weights."""
        return [batch.state_dict() for batch in self.ready()]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        for batch in state:
            restored = RolloutBatch.from_state_dict(batch)
            restored.metrics["time/sampled_at"] = 0.0  # its time was on the clock of an earlier fit
            self._add(restored)

    def close(self) -> bool:
        """Stop the thread without waiting for it; return whether it was sampling."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
        return any(not future.done() for _, future in self._pending)

    def _sample_in_background(self, rollouts: range) -> None:
        if self._has_failed:
            raise RuntimeError("earlier rollouts could not be sampled")
        try:
            self._sample(rollouts, self._add)
        except BaseException:
            self._has_failed = True
            raise

    def collect(self, raises: bool = True) -> None:
        """Call ``on_sampled`` for the requests that have ended; raise the error of one that failed, if ``raises``."""
        while self._pending and self._pending[0][1].done():
            future = self._pending[0][1]
            if not raises and (future.cancelled() or future.exception() is not None):
                return
            self._finish_first()

    def _finish_first(self) -> None:
        """Wait for the first request; raise its error if it failed."""
        rollouts, future = self._pending[0]
        try:
            future.result()
        except BaseException:
            if future.done():  # otherwise the trainer was interrupted, and close() must see what is still pending
                self._pending.clear()  # later requests depend on this one
            raise
        self._pending.popleft()
        self._on_sampled(rollouts)

    def _add(self, batch: RolloutBatch) -> None:
        with self._changed:
            self._ready[batch.rollout] = batch
            self._changed.notify_all()

    def _notify(self, _: Future[None]) -> None:
        with self._changed:
            self._changed.notify_all()


def same_device() -> Callable[[], None] | None:
    """Return a function that gives a new thread the CUDA device of this one; a thread starts with device 0."""
    return partial(torch.cuda.set_device, torch.cuda.current_device()) if torch.cuda.is_initialized() else None
