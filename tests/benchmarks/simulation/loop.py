"""Event simulation of the loop, by the rules of ``WeightSync`` and of the data module's schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from lgrpo.functional.sync_cycle import (
    MAX_AHEAD,
    is_sync_due,
    num_rollouts_in_cycle,
    rollout_in_background,
    rollouts_to_sample,
)

Stage = Literal["sync", "overhead", "generate", "update"]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Settings that decide when a rollout is sampled."""

    period: int | None
    """v; None never syncs after the first time."""
    lead: int = 0
    generate_ahead: bool = False
    can_overlap: bool = False
    """Whether the engine has separate GPUs."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """One execution of a stage. ``busy`` is the mean over GPUs of its seconds; the span ends with the slowest GPU."""

    stage: Stage
    start: float
    end: float
    busy: float
    rollouts: range
    trained: int
    """Number of rollouts released for training when the stage was requested."""


@dataclass(kw_only=True)
class Run:
    """The spans and lags of a simulated run."""

    spans: list[Span] = field(default_factory=list)
    lags: list[int] = field(default_factory=list)
    """Lag of each rollout when its training starts, in rollouts."""

    def of(self, stage: str) -> list[Span]:
        return [span for span in self.spans if span.stage == stage]


@dataclass
class Loop:
    """Simulates training on ``num_rollouts`` rollouts, one after the other; call :meth:`run` once.

    Before a cycle starts, the trainer waits for the current generation and syncs. A rollout is sampled while the
    trainer waits, or by servers in the background. ``generate`` and ``update`` return the seconds of the slowest GPU
    and the mean over GPUs; ``overhead`` is the time of waking the engine and putting it to sleep.
    """

    schedule: Schedule
    num_rollouts: int
    sync: float
    overhead: float
    generate: Callable[[range], tuple[float, float]]
    update: Callable[[int], tuple[float, float]]

    def __post_init__(self) -> None:
        self.now = 0.0
        self.weights_of: dict[int, int] = {}  # rollouts that the sampling weights were trained on, by rollout
        self.ready_at: dict[int, float] = {}  # end of its generation, by rollout
        self.engine_weights = 0
        self.trained = 0
        self.cycle_end = 0
        self.result = Run()

    def run(self) -> Run:
        num_started = 0
        for rollout in range(self.num_rollouts):
            last = min(rollout + self.schedule.lead, self.num_rollouts - 1)
            while num_started <= last:
                self._start(num_started)
                num_started += 1
            self.now = max(self.now, self.ready_at[rollout])
            self.result.lags.append(rollout - self.weights_of[rollout])
            self.trained = rollout + 1
            following = rollout_in_background(
                rollout,
                self.schedule.lead,
                self.cycle_end,
                self.num_rollouts,
                max(self.weights_of) + 1,
                MAX_AHEAD if self.schedule.generate_ahead else 0,
            )
            if self.schedule.can_overlap and following is not None:
                self._request(following)
            seconds, busy = self.update(rollout)
            self._spend("update", seconds, busy, range(rollout, rollout + 1))
        return self.result

    def _start(self, rollout: int) -> None:
        period, lead = self.schedule.period, self.schedule.lead
        if is_sync_due(rollout, period, lead):
            self.now = max(self.now, self._generation_end())  # a sync waits for the generation
            self._spend("sync", self.sync, self.sync, range(rollout, rollout + 1))
            self.engine_weights = self.trained
            self.cycle_end = rollout + num_rollouts_in_cycle(rollout, period, lead)
        self._request(rollout)

    def _request(self, rollout: int) -> None:
        if rollout in self.weights_of:
            return
        rollouts = rollouts_to_sample(rollout, self.cycle_end, self.num_rollouts, self.schedule.generate_ahead)
        if self.schedule.can_overlap:
            rollouts = rollouts[:MAX_AHEAD]
        self.weights_of |= dict.fromkeys(rollouts, self.engine_weights)
        seconds, busy = self.generate(rollouts)
        if not self.schedule.can_overlap:
            self._spend("overhead", self.overhead, self.overhead, rollouts)
        start, self.now = self.now, max(self.now, self._generation_end())
        self._spend("generate", seconds, busy, rollouts)
        if not self.schedule.can_overlap:
            self.ready_at |= dict.fromkeys(rollouts, self.now)
            return
        each = seconds / len(rollouts)  # they become ready one after another
        self.ready_at |= {k: self.now - seconds + each * number for number, k in enumerate(rollouts, start=1)}
        self.now = start  # the trainer continues meanwhile

    def _generation_end(self) -> float:
        """Return the end of the last requested generation."""
        return max(self.ready_at.values(), default=0.0)

    def _spend(self, stage: Stage, seconds: float, busy: float, rollouts: range) -> None:
        start, self.now = self.now, self.now + seconds
        self.result.spans.append(
            Span(stage=stage, start=start, end=self.now, busy=busy, rollouts=rollouts, trained=self.trained)
        )
