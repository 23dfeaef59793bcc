"""The loop on a clock of its own: the rules of ``WeightSync`` and of the data module's schedule, event by event."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

Stage = Literal["sync", "around", "generate", "update"]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What decides when a rollout is sampled."""

    period: int
    lead: int = 0
    generate_ahead: bool = False
    can_overlap: bool = False
    """Whether the engine has GPUs of its own."""

    def is_due(self, rollout: int) -> bool:
        """Whether the engine gets the policy before rollout k."""
        return rollout == 0 or (rollout >= self.lead and (rollout - self.lead) % self.period == 0)

    def cycle(self, rollout: int) -> int:
        """How many rollouts are sampled from weights that are handed over before rollout k."""
        return self.lead if rollout < self.lead else self.period - (rollout - self.lead) % self.period


@dataclass(frozen=True, kw_only=True)
class Span:
    """A stage, from when to when; ``busy`` seconds of it on the average GPU, which may be done before the slowest."""

    stage: Stage
    start: float
    end: float
    busy: float
    rollouts: range
    trained: int
    """Rollouts trained on, or handed over to be, when it was asked for."""


@dataclass(kw_only=True)
class Run:
    """What a simulated run did."""

    spans: list[Span] = field(default_factory=list)
    lags: list[int] = field(default_factory=list)
    """Of each rollout when it begins to train, in rollouts."""

    def of(self, stage: str) -> list[Span]:
        return [span for span in self.spans if span.stage == stage]


@dataclass
class Loop:
    """Trains on so many rollouts.

    The trainer goes from rollout to rollout. Before a cycle begins it waits for whatever is being sampled, and syncs.
    It has a rollout sampled: now, or by servers, one after another, while it goes on. ``generate`` and ``update`` give
    the seconds until the slowest GPU is done, and those of the average one.
    """

    schedule: Schedule
    num_rollouts: int
    sync: float
    around: float
    generate: Callable[[range], tuple[float, float]]
    update: Callable[[int], tuple[float, float]]

    def __post_init__(self) -> None:
        self.now = 0.0
        self.asked: dict[int, int] = {}  # by rollout, the rollouts its weights were trained on
        self.ready_at: dict[int, float] = {}  # by rollout, when it is there
        self.held = 0
        self.trained = 0
        self.cycle_end = 0
        self.done = Run()

    def run(self) -> Run:
        begun = 0
        for rollout in range(self.num_rollouts):
            last = min(rollout + self.schedule.lead, self.num_rollouts - 1)
            while begun <= last:
                self._begin(begun)
                begun += 1
            self.now = max(self.now, self.ready_at[rollout])
            self.done.lags.append(rollout - self.asked[rollout])
            self.trained = rollout + 1
            following = rollout + self.schedule.lead + 1
            if self.schedule.can_overlap and following < min(self.cycle_end, self.num_rollouts):
                self._ask(following)
            whole, busy = self.update(rollout)
            self._spend("update", whole, busy, range(rollout, rollout + 1))
        return self.done

    def _begin(self, rollout: int) -> None:
        if self.schedule.is_due(rollout):
            self.now = max(self.now, self._idle_from())  # a sync must not meet a generation
            self._spend("sync", self.sync, self.sync, range(rollout, rollout + 1))
            self.held = self.trained
            self.cycle_end = rollout + self.schedule.cycle(rollout)
        self._ask(rollout)

    def _ask(self, rollout: int) -> None:
        if rollout in self.asked:
            return
        end = min(self.cycle_end, self.num_rollouts) if self.schedule.generate_ahead else rollout + 1
        rollouts = range(rollout, max(end, rollout + 1))
        self.asked |= dict.fromkeys(rollouts, self.held)
        whole, busy = self.generate(rollouts)
        if not self.schedule.can_overlap:
            self._spend("around", self.around, self.around, rollouts)
        asked, self.now = self.now, max(self.now, self._idle_from())
        self._spend("generate", whole, busy, rollouts)
        self.ready_at |= dict.fromkeys(rollouts, self.now)
        if self.schedule.can_overlap:
            self.now = asked  # the trainer goes on meanwhile

    def _idle_from(self) -> float:
        """When all that was asked for is there."""
        return max(self.ready_at.values(), default=0.0)

    def _spend(self, stage: Stage, whole: float, busy: float, rollouts: range) -> None:
        start, self.now = self.now, self.now + whole
        self.done.spans.append(
            Span(stage=stage, start=start, end=self.now, busy=busy, rollouts=rollouts, trained=self.trained)
        )
