"""The data of a page: everything it shows of its runs, in types that JSON can represent."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from typing import Any

from lgrpo.report.charts import chart_sections
from lgrpo.report.downsample import Points, downsample_points, downsample_rollouts, smooth_points, thin_points
from lgrpo.report.gantt import gantt
from lgrpo.report.record import RunRecord
from lgrpo.report.seeds import SeedGroup, seed_groups
from lgrpo.report.series import Series
from lgrpo.report.timeline import clock, timeline

MAX_POINTS = 1500
"""Maximum number of points of a curve."""
MAX_CHARACTERS = 50_000_000
"""Maximum number of characters of all completions together."""
SMOOTHING_WINDOWS = (5, 20, 100)
"""Numbers of points that the menu of the page offers to average."""
STAGES = ("sync", "generate", "score", "update")


def page_data(runs: list[RunRecord], max_completions: int = 20_000, refresh: float | None = None) -> dict[str, Any]:
    """Return the data that the scripts in ``assets`` show; see :func:`lgrpo.report.write_page` for the arguments."""
    return {
        "made": time.time(),
        "refresh": refresh,
        "max_points": MAX_POINTS,
        "smoothing_windows": SMOOTHING_WINDOWS,
        "runs": [_run_data(run) for run in runs],
        "groups": [_group_data(group) for group in seed_groups(runs)],
        "sections": chart_sections(dict.fromkeys(name for run in runs for name in run.series)),
        "completions": _completions(runs, max_completions),
        "settings": _settings(runs),
        "notes": _notes(runs),
    }


def _sync_period(settings: dict[str, Any]) -> Any:
    """Return v; of a schedule, the values by their first rollouts as text."""
    prefix = "weight_sync.period."
    schedule = {int(key.removeprefix(prefix)): v for key, v in settings.items() if key.startswith(prefix)}
    if not schedule:
        return settings.get("weight_sync.period")
    return ", ".join(f"{first}: {'∞' if v is None else v}" for first, v in sorted(schedule.items()))


def _overlaps(settings: dict[str, Any]) -> bool:
    """Return whether rollouts were sampled while others were trained on: by default those of servers are."""
    overlap = settings.get("data.overlap")
    if overlap is None:
        overlap = str(settings.get("data.engine")).endswith(".VLLMServerEngine")
    return bool(overlap and (settings.get("data.lead") or _sync_period(settings) != 1))


def _run_data(run: RunRecord) -> dict[str, Any]:
    return {
        "name": run.name,
        "path": str(run.path),
        "task": _short_task(run),
        "model": run.settings.get("model.policy.name") or run.settings.get("model.policy.config.model_type"),
        "sync": str(run.settings.get("weight_sync", "")).rpartition(".")[2],
        "sync_period": _sync_period(run.settings),
        "reuse": run.settings.get("data.reuse"),
        "num_prompts": run.settings.get("data.num_prompts"),
        "group_size": run.settings.get("data.group_size"),
        "overlaps": _overlaps(run.settings),
        "num_steps": run.num_steps,
        "planned_steps": run.planned_steps,
        "written": run.written,
        "notes": run.notes,
        "headline": _headline(run),
        "stages": _stages(run),
        "timeline": timeline(run),
        "gantt": gantt(run),
        "num_points": max((len(points) for points in run.series.values()), default=0),
        "syncs": _columns(run.syncs, numbers=("version", "step"), texts=("checksum",)),
        **_curves(run.series, clock(run)),
        "num_completions": len(run.completions),
    }


def _group_data(group: SeedGroup) -> dict[str, Any]:
    """Return the curves of a group of runs, in the form of a single run."""
    syncs = _columns(group.runs[0].syncs, numbers=("version", "step"), texts=("checksum",))
    return {"name": group.name, "members": group.members, "syncs": syncs, **_curves(group.series, group.clock)}


def _curves(series: Series, clock: Points) -> dict[str, Any]:
    """Return what a chart needs. Curves that lose points are smoothed here, because the page has too few of them."""
    window = smoothing_window(len(series.get("rollout/reward", [])))
    long = {name: points for name, points in series.items() if len(points) > MAX_POINTS}
    return {
        "clock": _curve(clock),
        "series": {name: _curve(points) for name, points in series.items()},
        "smoothed": {
            name: {size: _smooth_curve(points, size) for size in {window, *SMOOTHING_WINDOWS}}
            for name, points in long.items()
        },
        "smoothing_window": window,
    }


def _smooth_curve(points: Points, window: int) -> list[list[Any]]:
    return _curve(thin_points(smooth_points(points, window), MAX_POINTS // 2))


def _completions(runs: list[RunRecord], max_completions: int) -> dict[str, Any]:
    """Return the table of completions by column, each distinct prompt stored once."""
    rows = []
    for number, run in enumerate(runs):
        kept = downsample_rollouts(run.completions, max(1, max_completions // len(runs)), MAX_CHARACTERS // len(runs))
        rows += [{**row, "run": number} for row in kept]
    prompts: dict[str, int] = {}
    for row in rows:
        row["prompt"] = prompts.setdefault(_text(row.get("prompt")), len(prompts))
    return {"prompts": list(prompts), "columns": _columns(rows, numbers=("run",), texts=("completion", "notes"))}


def _columns(rows: list[dict[str, Any]], numbers: Sequence[str], texts: Sequence[str]) -> dict[str, list[Any]]:
    """Return the rows by column: ``texts`` as strings, all other fields as numbers, null where a row has none.

    The columns ``numbers`` and ``texts`` exist even if there are no rows.
    """
    names = dict.fromkeys([*numbers, *texts, *(name for row in rows for name in row)])
    return {name: [(_text if name in texts else _number)(row.get(name)) for row in rows] for name in names}


def _short_task(run: RunRecord) -> str | None:
    """Return the class of the task with its numeric settings; the others are in the table of settings."""
    if run.task is None:
        return None
    values = {key.removeprefix("data.task."): v for key, v in run.settings.items() if key.startswith("data.task.")}
    given = [f"{key}={_shown(v)}" for key, v in values.items() if "." not in key and isinstance(v, int | float)]
    return f"{run.task.partition('(')[0]}({', '.join(given)})"


def smoothing_window(num_points: int) -> int:
    """Return the number of points that a smoothed curve averages."""
    return min(50, max(5, num_points // 25))


def _headline(run: RunRecord) -> dict[str, Any]:
    """Return the metrics that sum up a run."""
    reward = [value for _, value in run.series.get("rollout/reward", []) if math.isfinite(value)]
    scores = run.series.get("val/pass@1", [])
    errors = dict(run.series.get("val/pass@1_stderr", []))
    last = smoothing_window(len(reward))
    seconds = clock(run)
    return {
        "reward": _number(_mean(reward[-last:])) if reward else None,
        "reward_over": min(last, len(reward)),
        "pass_first": _number(scores[0][1]) if scores else None,
        "pass_last": _number(scores[-1][1]) if scores else None,
        "pass_error": _number(errors.get(scores[-1][0])) if scores else None,
        "pass_best": _number(max(value for _, value in scores)) if scores else None,
        "lag_max": _number(max((v for _, v in run.series.get("train/lag_max", [])), default=None)),
        "trainer_idle": _number(_mean([v for _, v in run.series.get("time/trainer_idle_share", [])])),
        "engine_idle": _number(_mean([v for _, v in run.series.get("time/engine_idle_share", [])])),
        "seconds": _number(seconds[-1][1]) if seconds else None,
    }


def _stages(run: RunRecord) -> dict[str, Any]:
    """Return the mean seconds of a rollout in each stage; a rollout has ``reuse`` updates."""
    seconds = {}
    for stage in STAGES:
        if points := run.series.get(f"time/{stage}"):
            per_rollout = [value for step, value in points if stage == "update" or step % run.reuse == 0]
            seconds[stage] = _number(_mean(per_rollout) * (run.reuse if stage == "update" else 1))
    return seconds


def _settings(runs: list[RunRecord]) -> list[dict[str, Any]]:
    """Return every setting with its value in each run; None where a run does not have it (not the text "null")."""
    rows = []
    for key in dict.fromkeys(key for run in runs for key in run.settings):
        values = [_shown(run.settings[key]) if key in run.settings else None for run in runs]
        before = [_shown(run.changed[key]) if key in run.changed else None for run in runs]
        rows.append({"key": key, "values": values, "before": before})
    return rows


def _notes(runs: list[RunRecord]) -> list[str]:
    """Return warnings about the comparison of the runs."""
    if len({run.task for run in runs}) > 1:
        return ["These runs train on different tasks: their rewards and pass@k cannot be compared."]
    evaluations = [{k: v for k, v in run.settings.items() if k.startswith("data.evaluation.")} for run in runs]
    if any(evaluation != evaluations[0] for evaluation in evaluations):
        return ["These runs are validated differently (data.evaluation): compare their pass@k with care."]
    return []


def _curve(points: Points) -> list[list[Any]]:
    """Return [steps, values], downsampled."""
    kept = downsample_points(points, MAX_POINTS)
    return [[step for step, _ in kept], [_number(value) for _, value in kept]]


def _number(value: Any) -> float | int | bool | None:
    """Return a number with six significant digits; None for anything that is not a finite number."""
    if isinstance(value, bool | int):
        return value
    return float(f"{value:.6g}") if isinstance(value, float) and math.isfinite(value) else None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else json.dumps(value, default=str)


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan
