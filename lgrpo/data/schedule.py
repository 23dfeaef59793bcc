"""Which rollout is sampled when: sync cycles, the lead, and what is sampled ahead of its turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import lightning as L

from lgrpo.data.queue import RolloutQueue
from lgrpo.engines import RolloutEngine
from lgrpo.hooks import call_rollout_start, call_stage
from lgrpo.types import RolloutBatch


class RolloutSchedule:
    """Begins rollouts in order, each once: first its hooks, which may sync, then its samples."""

    def __init__(
        self,
        engine: RolloutEngine,
        sample: Callable[[range], list[RolloutBatch]],
        rollouts_per_epoch: Callable[[], int],
        *,
        reuse: int,
        lead: int,
        generate_ahead: bool,
    ) -> None:
        self.engine = engine
        self.sample = sample
        self.rollouts_per_epoch = rollouts_per_epoch
        self.reuse = reuse
        self.lead = lead
        self.generate_ahead = generate_ahead
        self._queue = RolloutQueue(sample, self._sampled, engine.can_overlap)
        self._started = -1
        self._cycle_end: int | None = 0

    def reset(self, trainer: L.Trainer) -> None:
        """Forgets the rollouts of an earlier fit."""
        self._queue.close()
        self._queue = RolloutQueue(self.sample, self._sampled, self.engine.can_overlap)
        self._started = trainer.global_step // self.reuse - 1

    def get(self, trainer: L.Trainer, rollout: int) -> tuple[RolloutBatch, float]:
        """Rollout k, sampled by now, and the seconds its hooks took."""
        seconds = self._start(trainer, rollout + self.lead)
        if rollout not in self._queue:  # an interrupt came between its hooks and its samples
            self._ask(trainer, rollout)
        return self._queue.get(rollout), seconds

    def ready(self) -> list[RolloutBatch]:
        """Rollouts that are sampled and not yet handed over, in order."""
        return self._queue.ready()

    def handed_over(self, trainer: L.Trainer, rollout: int) -> None:
        """Rollout k is about to train: the next one is sampled in the background, where the same weights sample it."""
        self._queue.drop(rollout)
        following = rollout + self.lead + 1
        if (
            self.engine.can_overlap
            and self._cycle_end is not None
            and following < self._end_of_cycle(trainer, following)
        ):
            self._ask(trainer, following)

    def wait(self) -> None:
        """Until nothing is being sampled."""
        self._queue.wait()

    def close(self) -> None:
        """Nothing more is sampled; what is being sampled is given up."""
        if self._queue.close():
            self.engine.close()  # so that a generation in the background ends, and does not keep the process

    def state_dict(self) -> dict[str, Any]:
        return {"queue": self._queue.state_dict(), "started": self._started, "cycle_end": self._cycle_end}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._started, self._cycle_end = state["started"], state["cycle_end"]
        self._queue.load_state_dict(state["queue"])

    def _start(self, trainer: L.Trainer, last: int) -> float:
        """Begins every rollout up to ``last`` that has not begun. Seconds of the hooks."""
        seconds = 0.0
        for rollout in range(self._started + 1, min(last + 1, self.end_of_run(trainer))):
            if self._cycle_end is None or rollout >= self._cycle_end:
                self._queue.wait()  # a sync must not meet a generation
            version, start = self.engine.version, time.perf_counter()
            call_stage(trainer, "sync")
            call_rollout_start(trainer, rollout)
            self._started = rollout
            seconds += time.perf_counter() - start
            if self.engine.version != version:
                count = self.engine.num_rollouts
                self._cycle_end = None if count is None else rollout + count
            call_stage(
                trainer, "generate"
            )  # also where that goes on in the background: it is what the trainer waits for
            self._ask(trainer, rollout)
        return seconds

    def _ask(self, trainer: L.Trainer, rollout: int) -> None:
        """Has a rollout sampled, and with ``generate_ahead`` all that follow it up to the next sync."""
        if rollout not in self._queue:
            end = self._end_of_cycle(trainer, rollout) if self.generate_ahead else rollout + 1
            self._queue.ask(range(rollout, max(end, rollout + 1)))

    def _sampled(self, rollouts: range) -> None:
        self.engine.spent = self._cycle_end is not None and rollouts.stop >= self._cycle_end
        self.engine.rest()

    def _end_of_cycle(self, trainer: L.Trainer, rollout: int) -> int:
        """The first rollout that the weights at hand will not sample, as far as that is known."""
        cycle_end = rollout + 1 if self._cycle_end is None else self._cycle_end
        return min(cycle_end, self.end_of_run(trainer))

    def end_of_run(self, trainer: L.Trainer) -> int:
        """The first rollout that will not be trained on."""
        ends = []
        if trainer.max_epochs is not None and trainer.max_epochs >= 0:
            ends.append(trainer.max_epochs * self.rollouts_per_epoch())
        if trainer.max_steps >= 0:
            ends.append(-(-trainer.max_steps // self.reuse))
        return max(min(ends, default=2**62), trainer.global_step // self.reuse + 1)
