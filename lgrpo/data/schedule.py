"""When each rollout is sampled: after its sync, ahead of training by the lead, in the background where possible.

:class:`RolloutSchedule` decides which rollouts are sampled next; a ``RolloutQueue`` (``queue.py``) samples them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import lightning as L

from lgrpo.checks import check_count
from lgrpo.data.queue import RolloutQueue
from lgrpo.engines import RolloutEngine
from lgrpo.engines.in_flight import SyncPause
from lgrpo.functional.sync_cycle import ENDLESS, MAX_AHEAD, rollout_in_background, rollouts_to_sample
from lgrpo.hooks import call_rollout_start, call_stage
from lgrpo.types import RolloutBatch


class Sampler(Protocol):
    """Samples rollouts, and may carry something from one to the next."""

    def __call__(self, rollouts: range, deliver: Callable[[RolloutBatch], None]) -> None:
        """Sample and score a range of rollouts, and pass them on in order."""

    def on_sync(self) -> None:
        """Run after each sync, before the first rollout of its cycle is requested."""

    def on_request(self, rollouts: range) -> None:
        """Run when a range of rollouts is requested, in the trainer's thread."""

    def state_dict(self, rollout: int) -> dict[str, Any] | None:
        """Return what sampling needs to continue after a rollout."""

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Restore it."""


MAX_BYTES = 8 * 2**30
"""Most memory of rollouts that wait to be trained on, if they are sampled in the background."""


class RolloutSchedule:
    """Starts rollouts in order, each once: first its ``on_rollout_start`` hooks, which may sync, then its sampling.

    ``reset`` begins a fit. For each rollout k, ``get`` returns it, starting all rollouts up to k + lead before, and
    ``release`` drops it from the queue when training on it begins. ``close`` ends a fit that failed or stopped early.
    """

    def __init__(self, engine: RolloutEngine, *, reuse: int, lead: int, generate_ahead: bool, overlap: bool) -> None:
        self.engine = engine
        self.reuse = reuse
        self.lead = lead
        self.generate_ahead = generate_ahead
        self.overlap = overlap
        self.pause = SyncPause(engine)
        self._queue = RolloutQueue(_not_reset, self._on_sampled, in_background=False)
        self._rollouts_per_epoch = 0
        self._ahead = 0
        self._last_started = self._last_released = -1
        self._cycle_end: int | None = 0
        self._sampler: Sampler | None = None

    @property
    def is_sampled_early(self) -> bool:
        """Whether a rollout may have been sampled some time before it is trained on."""
        return self.lead > 0 or self.generate_ahead or self.overlap

    def reset(self, trainer: L.Trainer, sampler: Sampler, rollouts_per_epoch: int, rollout_bytes: int) -> None:
        """Discard the rollouts of an earlier fit.

        Args:
            trainer: The Trainer.
            sampler: Samples and scores rollouts.
            rollouts_per_epoch: Rollouts in a Lightning epoch.
            rollout_bytes: Most memory that a rollout takes, which limits how many are sampled ahead in the background.
        """
        self._queue.close()
        self.pause.is_allowed = False
        self._sampler = sampler
        self._queue = RolloutQueue(sampler, self._on_sampled, self.overlap)
        self._rollouts_per_epoch = rollouts_per_epoch
        self._ahead = min(MAX_AHEAD, max(1, MAX_BYTES // (2 * rollout_bytes))) if self.generate_ahead else 0
        self._last_started = self._last_released = trainer.global_step // self.reuse - 1

    def get(self, trainer: L.Trainer, rollout: int) -> tuple[RolloutBatch, float]:
        """Return rollout k, waiting until it is sampled, and the seconds spent in its start hooks."""
        for started in range(rollout, self._last_started + 1):
            # After a resume, or an interrupt before its sampling. Now: the next hooks may sync other weights.
            self._request(trainer, started)
        seconds = self._start(trainer, rollout + self.lead)
        return self._queue.get(rollout), seconds

    def ready(self) -> list[RolloutBatch]:
        """Return the rollouts that are sampled and not yet released, in order."""
        return self._queue.ready()

    def release(self, trainer: L.Trainer, rollout: int) -> None:
        """Drop rollout k, whose training begins, and sample more in the background if no sync comes before."""
        self._queue.drop(rollout)
        self._last_released = rollout
        if self.overlap:
            ends = self._cycle_end, self.end_of_run(trainer)
            following = rollout_in_background(rollout, self.lead, *ends, self._queue.end, self._ahead)
            if following is not None:
                self._request(trainer, following)

    def wait(self) -> None:
        """Wait until nothing is being sampled."""
        self._queue.wait()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Have nothing sampled inside the context; a generation ends before it, or continues after it (in flight)."""
        if self.pause.is_allowed:
            with self.pause.paused():
                self._cycle_end = None  # rollouts of the old cycle that end later do not finish the new one
                yield
        else:
            self._queue.wait()
            yield

    def close(self) -> None:
        """Stop sampling and give up what is being sampled, and episodes that would be continued."""
        if self._queue.close():
            self.engine.close()  # ends a generation in the background, which would keep the process alive
        self.engine.end_episodes()

    def rest_engine(self) -> None:
        """Have the engine release its memory, unless it may be sampling in the background."""
        if not self.overlap:
            self.engine.sleep()

    def state_dict(self) -> dict[str, Any]:
        self._queue.collect(raises=False)  # a checkpoint can be written after an error too
        queue = self._queue.state_dict()
        last_sampled = max([self._last_released, *(batch["rollout"] for batch in queue)])
        return {
            "queue": queue,
            "last_sampled": last_sampled,
            "last_started": self._last_started,
            "cycle_end": self._cycle_end,
            "sampler": self._sampler and self._sampler.state_dict(last_sampled),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._last_started, self._cycle_end = state["last_started"], state["cycle_end"]
        self._last_released = state.get("last_sampled", -1)
        self._queue.load_state_dict(state["queue"])
        if self._sampler is not None:
            self._sampler.load_state_dict(state.get("sampler"))

    def end_of_run(self, trainer: L.Trainer) -> int:
        """Return the index of the first rollout that will not be trained on."""
        ends = []
        if trainer.max_epochs is not None and trainer.max_epochs >= 0:
            ends.append(trainer.max_epochs * self._rollouts_per_epoch)
        if trainer.max_steps >= 0:
            ends.append(-(-trainer.max_steps // self.reuse))
        return max(min(ends, default=ENDLESS), trainer.global_step // self.reuse + 1)

    def _start(self, trainer: L.Trainer, last: int) -> float:
        """Start every rollout up to ``last`` that is not started yet; return the seconds spent in hooks."""
        seconds = 0.0
        for rollout in range(self._last_started + 1, min(last + 1, self.end_of_run(trainer))):
            if not self.pause.is_allowed and (self._cycle_end is None or rollout >= self._cycle_end):
                self._queue.wait()  # weights must not be replaced during a generation
            version, start = self.engine.state.version, time.perf_counter()
            call_stage(trainer, "sync")
            call_rollout_start(trainer, rollout)
            self._last_started = rollout
            seconds += time.perf_counter() - start
            if self.engine.state.version != version:
                count = self.engine.state.num_rollouts
                self._cycle_end = None if count is None else rollout + count
                if self._sampler is not None:
                    self._sampler.on_sync()
            call_stage(trainer, "generate")  # with background sampling too: the trainer waits for it next
            self._request(trainer, rollout)
        return seconds

    def _request(self, trainer: L.Trainer, rollout: int) -> None:
        """Request a rollout from the queue, and with ``generate_ahead`` the rest of its cycle or epoch."""
        if rollout not in self._queue:
            ends = self._cycle_end, self.end_of_run(trainer)
            rollouts = rollouts_to_sample(rollout, *ends, self.generate_ahead, self._rollouts_per_epoch)
            rollouts = rollouts[: max(1, self._ahead)] if self.overlap else rollouts
            if self._sampler is not None:
                self._sampler.on_request(rollouts)
            self._queue.request(rollouts)

    def _on_sampled(self, rollouts: range) -> None:
        if self._cycle_end is not None and rollouts.stop >= self._cycle_end:
            self.engine.finish_cycle()
        self.rest_engine()


def check_lags(max_lag: int | None, lead: int, reuse: int, engine: RolloutEngine) -> None:
    """Raise an error if every completion is older than ``max_lag`` when it is trained on; recorded ones have no lag."""
    check_count("data.lead", lead, at_least=0)
    check_count("data.max_lag", max_lag, at_least=0)
    if max_lag is not None and max_lag < lead * reuse and not engine.replays:
        raise ValueError(
            f"data.max_lag is {max_lag}, but with data.lead {lead} and data.reuse {reuse} completions are at least "
            f"{lead * reuse} optimizer steps old when they are trained on, so nothing would be: raise max_lag, or "
            "lower the lead"
        )


def checked_overlap(overlap: bool | None, engine: RolloutEngine | type[RolloutEngine]) -> bool:
    """Return whether sampling overlaps with training; raise an error if the engine cannot do that."""
    if overlap and not engine.can_overlap:
        name = (engine if isinstance(engine, type) else type(engine)).__name__
        raise ValueError(
            f"data.overlap is true, but {name} cannot sample while the trainer updates: use "
            "lgrpo.engines.EnginePool, which runs vLLM in other processes, or VLLMServerEngine"
        )
    return engine.has_own_device if overlap is None else overlap


def _not_reset(rollouts: range, deliver: object) -> None:
    raise RuntimeError("a RolloutSchedule has nothing to sample with: call reset first")
