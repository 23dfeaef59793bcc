"""The page of one or several runs: one HTML file that needs nothing else to open.

Whatever a run left behind is text somebody else may have chosen. It travels as compressed JSON in base64, which holds
no markup, is put into the page as text alone, and the page's policy lets no script run but its own.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
import os
import tempfile
import time
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from lgrpo.report.charts import SMOOTH, chart_sections
from lgrpo.report.record import RunRecord, read_runs
from lgrpo.report.thin import Points, smooth_points, thin_points, thin_rollouts

MOST_POINTS = 1500
"""Of a curve on the page."""
MOST_CHARACTERS = 50_000_000
"""Of all completions on the page."""
COLUMNS = ("rollout", "step", "version", "lag", "reward", "advantage", "live")
STAGES = ("sync", "generate", "score", "update")


def write_page(
    paths: Sequence[Path], out: Path, *, most_completions: int = 20_000, refresh: float | None = None
) -> list[RunRecord]:
    """Reads the runs and writes their page, all at once: a browser never sees half of it.

    Args:
        paths: Folders of runs.
        out: The file.
        most_completions: Rows of the table of completions, over all runs.
        refresh: The page loads itself again after so many seconds.
    """
    runs = read_runs(paths)
    html = page_html(page_data(runs, most_completions, refresh))
    out.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=out.parent, prefix=f".{out.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(html)
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, out)
    except BaseException:
        os.unlink(name)
        raise
    return runs


def page_html(data: dict[str, Any]) -> str:
    """The page that shows this data."""
    assets = files("lgrpo.report") / "assets"
    script, style, markup = ((assets / f"page.{kind}").read_text(encoding="utf-8") for kind in ("js", "css", "html"))
    library = (assets / "uPlot.iife.min.js").read_text(encoding="utf-8").strip()
    licence = (assets / "uPlot.LICENSE").read_text(encoding="utf-8").strip()
    library = f"/*!\n{licence}\n*/\n{library}"
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    packed = base64.b64encode(gzip.compress(text.encode("ascii"), 6, mtime=0)).decode("ascii")
    parts = {
        "POLICY": f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"script-src {_digest(library)} {_digest(script)}",
        "LIBRARY_STYLE": (assets / "uPlot.min.css").read_text(encoding="utf-8").strip(),
        "STYLE": style,
        "DATA": packed,
        "LIBRARY": library,
        "SCRIPT": script,
    }
    for name, part in parts.items():
        markup = markup.replace(f"{{{{{name}}}}}", part, 1)
    return markup


def page_data(runs: list[RunRecord], most_completions: int = 20_000, refresh: float | None = None) -> dict[str, Any]:
    """What the page shows, as JSON can hold it."""
    shown = [_with_derived(run) for run in runs]
    completions = [
        thin_rollouts(run.completions, max(1, most_completions // len(runs)), MOST_CHARACTERS // len(runs))
        for run in runs
    ]
    prompts: dict[str, int] = {}
    columns: dict[str, list[Any]] = {name: [] for name in ("run", "prompt", "completion", *COLUMNS)}
    for number, rows in enumerate(completions):
        for row in rows:
            columns["run"].append(number)
            columns["prompt"].append(prompts.setdefault(_text(row.get("prompt")), len(prompts)))
            columns["completion"].append(_text(row.get("completion")))
            for name in COLUMNS:
                columns[name].append(_number(row.get(name)))
    names = list(dict.fromkeys(name for series in shown for name in series))
    return {
        "made": time.time(),
        "refresh": refresh,
        "most_points": MOST_POINTS,
        "runs": [_run_data(run, series, len(rows)) for run, series, rows in zip(runs, shown, completions, strict=True)],
        "sections": chart_sections(names),
        "completions": {"prompts": list(prompts), "columns": columns},
        "settings": _settings(runs),
        "notes": _notes(runs),
    }


def _run_data(run: RunRecord, series: dict[str, Points], num_completions: int) -> dict[str, Any]:
    first_of_rollout = [s for s in range(run.num_steps) if s % run.reuse == 0]
    return {
        "name": run.name,
        "path": str(run.path),
        "task": _short_task(run),
        "model": run.settings.get("model.policy.name") or run.settings.get("model.policy.config.model_type"),
        "place": {
            "v": run.settings.get("weight_sync.period"),
            "i": run.settings.get("data.reuse"),
            "P": run.settings.get("data.num_prompts"),
            "G": run.settings.get("data.group_size"),
        },
        "sync": str(run.settings.get("weight_sync", "")).rpartition(".")[2],
        "seed": run.settings.get("seed_everything"),
        "num_steps": run.num_steps,
        "planned_steps": run.planned_steps,
        "written": run.written,
        "notes": run.notes,
        "headline": _headline(run),
        "stages": {
            stage: _mean([v for s, v in run.series.get(f"time/{stage}", []) if stage == "update" or s % run.reuse == 0])
            * (run.reuse if stage == "update" else 1)
            for stage in STAGES
            if f"time/{stage}" in run.series
        },
        "num_rollouts": len(first_of_rollout),
        "overlaps": bool(run.settings.get("data.lead") or 0),
        "clock": _columns(thin_points(_clock(run), MOST_POINTS)),
        "series": {name: _columns(thin_points(points, MOST_POINTS)) for name, points in series.items()},
        "num_points": max((len(points) for points in series.values()), default=0),
        "syncs": {
            name: [_number(row.get(name)) if name != "checksum" else _text(row.get(name)) for row in run.syncs]
            for name in ("version", "rollout", "step", "checksum", "num_bytes", "seconds")
        },
        "smoothing_window": smoothing_window(len(run.series.get("rollout/reward", []))),
        "num_completions": len(run.completions),
        "shown_completions": num_completions,
    }


def _short_task(run: RunRecord) -> str | None:
    """The task with its plain settings; what its template and reward are is among the settings."""
    if run.task is None:
        return None
    own = {key.removeprefix("data.task."): value for key, value in run.settings.items() if key.startswith("data.task.")}
    given = [
        f"{key}={_shown(value)}" for key, value in own.items() if "." not in key and isinstance(value, int | float)
    ]
    return f"{run.task.partition('(')[0]}({', '.join(given)})"


def _with_derived(run: RunRecord) -> dict[str, Points]:
    """The logged curves, and those derived from them."""
    series: dict[str, Points] = dict(run.series)
    reward = run.series.get("rollout/reward", [])
    if len(reward) >= 20:
        series["rollout/reward" + SMOOTH] = smooth_points(reward, smoothing_window(len(reward)))
    return series


def smoothing_window(num_points: int) -> int:
    """Points a smoothed curve takes the mean of."""
    return min(50, max(5, num_points // 25))


def _headline(run: RunRecord) -> dict[str, Any]:
    """The figures a run is summed up by."""
    reward = [value for _, value in run.series.get("rollout/reward", []) if math.isfinite(value)]
    scores = run.series.get("val/pass@1", [])
    errors = dict(run.series.get("val/pass@1_stderr", []))
    last = smoothing_window(len(reward))
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
        "seconds": _number(_clock(run)[-1][1]) if _clock(run) else None,
    }


def _clock(run: RunRecord) -> list[tuple[int, float]]:
    """Seconds of waiting and updating before each step, where every step was logged."""
    wait, update = dict(run.series.get("time/wait", [])), dict(run.series.get("time/update", []))
    if not update or len(update) != run.num_steps:
        return []
    seconds, clock = 0.0, [(0, 0.0)]
    for step in range(run.num_steps):
        waited = wait.get(step, 0.0) if step % run.reuse == 0 else 0.0
        seconds += sum(value for value in (waited, update.get(step, 0.0)) if math.isfinite(value))
        clock.append((step + 1, seconds))
    return clock


def _settings(runs: list[RunRecord]) -> list[dict[str, Any]]:
    """Every setting with its value in each run; null where a run does not have it, which is not the text "null"."""
    rows = []
    for key in dict.fromkeys(key for run in runs for key in run.settings):
        values = [_shown(run.settings[key]) if key in run.settings else None for run in runs]
        before = [_shown(run.changed[key]) if key in run.changed else None for run in runs]
        rows.append({"key": key, "values": values, "before": before})
    return rows


def _notes(runs: list[RunRecord]) -> list[str]:
    """What someone who compares these runs should know."""
    notes = []
    if len({run.task for run in runs}) > 1:
        notes.append(
            "These runs train on different tasks: their rewards and pass@k are drawn side by side, but do not compare."
        )
    elif len({_evaluation(run) for run in runs}) > 1:
        notes.append("These runs are validated differently (data.evaluation): their pass@k do not quite compare.")
    return notes


def _evaluation(run: RunRecord) -> str:
    return json.dumps({k: v for k, v in run.settings.items() if k.startswith("data.evaluation.")}, default=str)


def _columns(points: Points) -> list[list[Any]]:
    return [[step for step, _ in points], [_number(value) for _, value in points]]


def _number(value: Any) -> float | int | bool | None:
    """Six digits are more than a screen shows."""
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


def _digest(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
