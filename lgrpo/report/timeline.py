"""Where the time of a run went, rollout by rollout."""

from __future__ import annotations

import math
from typing import Any

from lgrpo.report.record import RunRecord

STAGES = ("sync", "generate", "score", "update", "validate")
MAX_COLUMNS = 160
"""Maximum number of columns of a timeline; each is one rollout or several."""


def clock(run: RunRecord) -> list[tuple[int, float]]:
    """Return the seconds of waiting and updating before each step; empty unless every step was logged."""
    wait, update = seconds_of(run, "wait"), seconds_of(run, "update")
    if not update or len(run.series["time/update"]) != run.num_steps:
        return []
    seconds, points = 0.0, [(0, 0.0)]
    for step in range(run.num_steps):
        seconds += (wait.get(step, 0.0) if step % run.reuse == 0 else 0.0) + update.get(step, 0.0)
        points.append((step + 1, seconds))
    return points


def timeline(run: RunRecord) -> list[dict[str, Any]]:
    """Return columns of consecutive rollouts with the seconds of each stage; empty unless every step was logged.

    Generation and scoring are the parts that the update waited for; a validation belongs to the rollout before it.
    """
    if not clock(run):
        return []
    wait, update, validate = (seconds_of(run, name) for name in ("wait", "update", "validate"))
    sync, score = seconds_of(run, "sync"), seconds_of(run, "score")
    rollouts = [dict.fromkeys(STAGES, 0.0) for _ in range(math.ceil(run.num_steps / run.reuse))]
    for rollout, stages in enumerate(rollouts):
        first = rollout * run.reuse
        left = wait.get(first, 0.0)
        for name, logged in (("sync", sync), ("score", score)):
            stages[name] = min(left, logged.get(first, 0.0))
            left -= stages[name]
        stages["generate"] = left
        stages["update"] = sum(update.get(step, 0.0) for step in range(first, first + run.reuse))
    for step, seconds in validate.items():
        rollouts[min(max(0, (step - 1) // run.reuse), len(rollouts) - 1)]["validate"] += seconds
    size = math.ceil(len(rollouts) / MAX_COLUMNS)
    columns = []
    for start in range(0, len(rollouts), size):
        piece = rollouts[start : start + size]
        totals = [round(sum(stages[name] for stages in piece), 4) for name in STAGES]
        columns.append({"first": start, "last": start + len(piece) - 1, "seconds": totals})
    return columns


def seconds_of(run: RunRecord, name: str) -> dict[int, float]:
    """Return the finite values of a metric of time by step."""
    return {step: value for step, value in run.series.get(f"time/{name}", []) if math.isfinite(value)}
