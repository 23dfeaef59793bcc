"""Chart of some rollouts of a run: the engine's generations and the trainer's stages on one clock."""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict, dataclass, field
from typing import Any

from lgrpo.report.record import RunRecord
from lgrpo.report.timeline import clock, seconds_of

MIN_ROLLOUTS, MAX_ROLLOUTS = 12, 24
"""Number of rollouts that a chart shows of a longer run: whole cycles if possible."""
VISIBLE_SHARE = 1 / 4000
"""Boxes that are shorter than this share of the chart are left out."""


@dataclass(kw_only=True)
class Box:
    """A stage of one rollout, or of several that were sampled in one call of the engine."""

    stage: str
    """generate, score, idle: the engine; wait, sync, update, validate: the trainer."""
    first: int
    last: int
    start: float
    """Seconds since the beginning of the fit."""
    end: float
    parts: dict[str, float] = field(default_factory=dict)
    """Seconds of a wait by what the trainer waited for."""


@dataclass(kw_only=True)
class _Times:
    """Metrics of one attempt at a run, by rollout."""

    rollouts: range
    wait: dict[int, float]
    clock: dict[int, float]
    sync: dict[int, float]
    generate: dict[int, float]
    score: dict[int, float]
    sampled_at: dict[int, float]
    update: dict[int, float]
    validate: dict[int, float]

    def end(self, rollout: int) -> float:
        """Return when training on a rollout and the validation after it ended."""
        return self.clock[rollout] + self.update[rollout] + self.validate.get(rollout, 0.0)


def gantt(run: RunRecord) -> dict[str, Any] | None:
    """Return the boxes of a chart; None if the run has no ``time/clock``, or not every step was logged."""
    times = _longest_attempt(run)
    if times is None or not clock(run):
        return None
    syncs = [row["rollout"] for row in run.syncs if isinstance(row.get("rollout"), int)]
    shown = shown_rollouts(times.rollouts, syncs)
    begin = times.clock[shown[0]] - times.wait[shown[0]]
    end = times.end(shown[-1])
    lead = run.settings.get("data.lead")
    boxes = _trainer_boxes(times, shown, lead if isinstance(lead, int) else 0) + _engine_boxes(times, begin, end)
    least = VISIBLE_SHARE * (end - begin)
    kept = [box for box in boxes if min(end, box.end) - max(begin, box.start) >= least]
    return {
        "first": shown[0],
        "last": shown[-1],
        "num_rollouts": math.ceil(run.num_steps / run.reuse),
        "begin": round(begin, 4),
        "end": round(end, 4),
        "syncs": [rollout for rollout in syncs if rollout in shown],
        "boxes": [_rounded(asdict(box)) for box in kept],
    }


def shown_rollouts(rollouts: range, syncs: list[int]) -> range:
    """Return the rollouts to show: all of a short run, otherwise some in its middle, from a sync to another.

    >>> shown_rollouts(range(0, 200), syncs=list(range(0, 200, 10)))
    range(90, 110)
    """
    if len(rollouts) <= MAX_ROLLOUTS:
        return rollouts
    middle = (rollouts.start + rollouts.stop - MIN_ROLLOUTS) // 2
    near = [rollout for rollout in syncs if abs(rollout - middle) <= len(rollouts) // 4]
    first = min(near, key=lambda rollout: abs(rollout - middle), default=middle)
    ends = [rollout for rollout in syncs if first + MIN_ROLLOUTS <= rollout <= first + MAX_ROLLOUTS]
    return range(first, min([*ends, first + MAX_ROLLOUTS, rollouts.stop]))


def _longest_attempt(run: RunRecord) -> _Times | None:
    """Return the times of the attempt at a run with the most rollouts: each attempt has its own clock."""
    by_rollout = {
        name: {step // run.reuse: value for step, value in seconds_of(run, name).items() if step % run.reuse == 0}
        for name in ("wait", "clock", "sync", "generate", "score", "sampled_at")
    }
    update: dict[int, float] = {}
    for step, seconds in seconds_of(run, "update").items():
        update[step // run.reuse] = update.get(step // run.reuse, 0.0) + seconds
    validate: dict[int, float] = {}
    for step, seconds in seconds_of(run, "validate").items():
        rollout = (step - 1) // run.reuse  # at step 0: before the first rollout
        validate[rollout] = validate.get(rollout, 0.0) + seconds
    known = sorted(by_rollout["clock"].keys() & by_rollout["wait"].keys() & update.keys())
    if not known:
        return None
    starts = {math.ceil(step / run.reuse) for step in run.attempt_starts}
    attempts = [range(known[0], known[0] + 1)]
    for before, rollout in itertools.pairwise(known):
        is_next = rollout == before + 1 and by_rollout["clock"][before] <= by_rollout["clock"][rollout]
        if is_next and rollout not in starts:
            attempts[-1] = range(attempts[-1].start, rollout + 1)
        else:
            attempts.append(range(rollout, rollout + 1))
    return _Times(rollouts=max(attempts, key=len), **by_rollout, update=update, validate=validate)


def _trainer_boxes(times: _Times, rollouts: range, lead: int) -> list[Box]:
    boxes = []
    for k in rollouts:
        now, sync = times.clock[k], min(times.sync.get(k, 0.0), times.wait[k])
        start = now - times.wait[k]
        # a sync waits until everything that was requested before is sampled
        synced = min(max(start, times.sampled_at.get(k + lead - 1, start)), now - sync)
        sampled = min(max(start, times.sampled_at.get(k, start)), now)
        scored = min(sampled + times.score.get(k, 0.0), now)
        parts = {"sync": sync, "generation": max(0.0, sampled - start - sync), "scores": scored - sampled}
        parts["preparation"] = max(0.0, times.wait[k] - sum(parts.values()))
        boxes += [
            Box(stage="wait", first=k, last=k, start=start, end=synced, parts=parts),
            Box(stage="sync", first=k + lead, last=k + lead, start=synced, end=synced + sync),
            Box(stage="wait", first=k, last=k, start=synced + sync, end=now, parts=parts),
            Box(stage="update", first=k, last=k, start=now, end=now + times.update[k]),
            Box(stage="validate", first=k, last=k, start=now + times.update[k], end=times.end(k)),
        ]
    return boxes


def _engine_boxes(times: _Times, begin: float, end: float) -> list[Box]:
    """Return the generations from ``begin`` to ``end``, the scoring after them, and the time between them."""
    boxes: list[Box] = []
    idle_since = begin
    # rollouts that were sampled in one call, and delivered when it ended, have the same time
    for sampled_at, group in itertools.groupby(times.rollouts, key=times.sampled_at.get):
        call = list(group)
        if not sampled_at:
            continue  # an attempt before this one sampled it
        start = sampled_at - sum(times.generate.get(k, 0.0) for k in call)
        scored = sampled_at + sum(times.score.get(k, 0.0) for k in call)
        if scored < begin or start > end:
            continue
        if start > idle_since:
            boxes.append(Box(stage="idle", first=call[0], last=call[0], start=idle_since, end=start))
        idle_since = max(idle_since, sampled_at)
        boxes.append(Box(stage="generate", first=call[0], last=call[-1], start=start, end=sampled_at))
        boxes.append(Box(stage="score", first=call[0], last=call[-1], start=sampled_at, end=scored))
    return boxes


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    return round(value, 4) if isinstance(value, float) else value
