"""The predicted times of a simulated run, and a table of several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.benchmarks.simulation.costs import Costs, Layout
from tests.benchmarks.simulation.loop import Loop, Run, Schedule, Span


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Means over whole cycles, without the first one."""

    layout: Layout
    schedule: Schedule
    step_seconds: float
    """Seconds from rollout to rollout, all passes over one included."""
    trainer_idle: float
    """``time/trainer_idle_share``: share of the time without an update."""
    engine_idle: float
    """``time/engine_idle_share``: share of the time without sampling."""
    gpu_idle: float
    """Share of all GPUs' time that is neither sampling nor update; waiting for the slowest GPU counts as idle."""
    lags: tuple[int, ...]
    """Lag of each rollout of a cycle when its training begins, in optimizer steps."""
    spans: tuple[Span, ...]
    """Stages of one cycle."""


def predict(costs: Costs, schedule: Schedule, num_rollouts: int = 24) -> Prediction:
    """Simulate a run and evaluate ``num_rollouts`` of it, rounded up to whole cycles, after the first cycle."""
    period = schedule.period
    first = -(-(schedule.lead + 1) // period) * period  # after the first cycle
    last = first + -(-num_rollouts // period) * period
    run = Loop(
        schedule,
        last + schedule.lead + period,  # the last cycle of a run samples nothing ahead
        sync=costs.sync,
        overhead=costs.overhead,
        generate=costs.generate,
        update=costs.update,
    ).run()
    ends = [span.end for span in run.of("update")]
    start, end = ends[first - 1], ends[last - 1]
    shares = {stage: _share(run, stage, start, end) for stage in ("generate", "update")}
    busy = {stage: _share(run, stage, start, end, busy=True) for stage in ("generate", "update")}
    layout = costs.layout
    sampling = layout.num_servers or layout.num_gpus
    cycle = start, ends[first + period - 1]
    return Prediction(
        layout=layout,
        schedule=schedule,
        step_seconds=(end - start) / (last - first),
        trainer_idle=1 - shares["update"],
        engine_idle=1 - shares["generate"],
        gpu_idle=1 - (sampling * busy["generate"] + layout.num_trainers * busy["update"]) / layout.num_gpus,
        lags=tuple(lag * costs.workload.reuse for lag in run.lags[first : first + period]),
        spans=tuple(span for span in run.spans if cycle[0] <= span.start < cycle[1]),
    )


def _share(run: Run, stage: str, start: float, end: float, *, busy: bool = False) -> float:
    """Return the share of an interval that a stage takes."""
    taken = 0.0
    for span in run.of(stage):
        if (inside := min(span.end, end) - max(span.start, start)) > 0:
            taken += inside * (span.busy / (span.end - span.start) if busy else 1.0)
    return taken / (end - start)


def table(predictions: Sequence[Prediction]) -> str:
    """Return a Markdown table with one line per prediction."""
    names = ("GPUs", "layout", "v", "step, s", "rollouts/h", "trainer idle", "engine idle", "GPUs idle", "lag")
    rows = [names]
    for each in predictions:
        lags = f"{sum(each.lags) / len(each.lags):.3g}, at most {max(each.lags)}" if max(each.lags) else "0"
        rows.append(
            (
                str(each.layout.num_gpus),
                each.layout.name,
                str(each.schedule.period),
                _number(each.step_seconds),
                _number(3600 / each.step_seconds),
                f"{each.trainer_idle:.0%}",
                f"{each.engine_idle:.0%}",
                f"{each.gpu_idle:.0%}",
                lags,
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(names))]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
