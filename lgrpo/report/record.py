"""A run folder as an object. Runs that are in progress, crashed, or lack a file are read as far as possible."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lgrpo.report.series import Series, read_metrics


@dataclass(kw_only=True)
class RunRecord:
    """The contents of a run folder."""

    path: Path
    name: str
    """Shortest suffix of the path that no other run on the page has."""
    series: Series
    settings: dict[str, Any]
    """Every setting of the last attempt by its dotted name."""
    changed: dict[str, Any]
    """Values of an earlier attempt, where they differ from ``settings``."""
    syncs: list[dict[str, Any]]
    completions: list[dict[str, Any]]
    written: float
    """Time at which a metric was last written, in seconds since 1970."""
    attempt_starts: list[int] = field(default_factory=list)
    """First step of each attempt."""
    notes: list[str] = field(default_factory=list)
    """Messages on what could not be read."""

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps that were logged."""
        return 1 + max((points[-1][0] for name, points in self.series.items() if name.startswith("train/")), default=-1)

    @property
    def planned_steps(self) -> int | None:
        """Number of optimizer steps that the settings ask for; None if they have no limit."""
        limits = []
        max_steps, epochs = self.settings.get("trainer.max_steps"), self.settings.get("trainer.max_epochs")
        rollouts = self.settings.get("data.num_rollouts")
        if isinstance(max_steps, int) and max_steps >= 0:
            limits.append(max_steps)
        if isinstance(epochs, int) and isinstance(rollouts, int) and epochs >= 0:
            limits.append(epochs * rollouts * self.reuse)
        return min(limits, default=None)

    @property
    def reuse(self) -> int:
        """Optimizer steps per rollout (i); 1 if unknown."""
        value = self.settings.get("data.reuse")
        return value if isinstance(value, int) and value > 0 else 1

    @property
    def task(self) -> str | None:
        """The task with all its settings, such as ``SortDigits(num_digits=3)``; None if unknown."""
        settings = {key: value for key, value in self.settings.items() if f"{key}.".startswith("data.task.")}
        if not settings:
            return None
        name = str(settings.pop("data.task", "")).rpartition(".")[2]
        given = ", ".join(
            f"{key.removeprefix('data.task.')}={value}" for key, value in settings.items() if value is not None
        )
        return f"{name}({given})"


def read_runs(paths: Sequence[Path]) -> list[RunRecord]:
    """Read run folders; exit with a message if a path is not a run or is given twice."""
    known: dict[Path, Path] = {}
    for path in paths:
        _check_run(path)
        if path.resolve() in known:
            raise SystemExit(f"lgrpo: {path} and {known[path.resolve()]} are the same run: name each once")
        known[path.resolve()] = path
    return [_read_run(path, name) for path, name in zip(paths, _short_names(list(known)), strict=True)]


def _check_run(path: Path) -> None:
    if not path.exists():
        raise SystemExit(f"lgrpo: there is no run folder {path}")
    if not path.is_dir():
        raise SystemExit(f"lgrpo: {path} is a file; give the folder of a run")
    if any(path.glob("metrics/version_*/metrics.csv")):
        return
    inside = sorted({str(file.parents[2]) for file in path.glob("*/metrics/version_*/metrics.csv")})
    if inside:
        some = ", ".join(inside[:5]) + (" …" if len(inside) > 5 else "")
        raise SystemExit(f"lgrpo: {path} is not a run, but contains {len(inside)}: name them ({some})")
    raise SystemExit(
        f"lgrpo: {path} contains no metrics: there is no {path / 'metrics'}/version_*/metrics.csv. Has the run "
        "made a step, and does it log to CSV (trainer.logger)?"
    )


def _short_names(paths: Sequence[Path]) -> list[str]:
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _read_run(path: Path, name: str) -> RunRecord:
    series, notes, attempt_starts = read_metrics(path)
    series = _read_evaluations(path) | series
    for metric, points in series.items():
        if odd := [step for step, value in points if not math.isfinite(value)]:
            notes.append(f"{metric} is not finite at {len(odd)} of {len(points)} steps, first at step {odd[0]}")
    settings, changed, settings_notes = _read_settings(path)
    syncs, syncs_notes = _read_rows(path / "syncs.jsonl", "version")
    completions, completions_notes = _read_rows(path / "completions.jsonl", "rollout")
    if not completions and not completions_notes:
        completions_notes = ["no completions were written: the callback lgrpo.callbacks.RolloutLog writes them"]
    return RunRecord(
        path=path,
        name=name,
        series=series,
        settings=settings,
        changed=changed,
        syncs=syncs,
        completions=completions,
        attempt_starts=attempt_starts,
        written=max(file.stat().st_mtime for file in path.glob("metrics/version_*/metrics.csv")),
        notes=[*notes, *settings_notes, *syncs_notes, *completions_notes],
    )


def _read_evaluations(path: Path) -> Series:
    """Return the results of ``lgrpo test --checkpoints`` as curves."""
    found: Series = {}
    for file in sorted(path.glob("evaluations/checkpoints-*.json")):
        try:
            table = {int(step): dict(metrics) for step, metrics in json.loads(file.read_bytes()).items()}
        except (ValueError, AttributeError, TypeError):  # incomplete, or written by another program
            continue
        for step, metrics in sorted(table.items()):
            for name, value in metrics.items():
                if isinstance(value, float | int):
                    found.setdefault(str(name), []).append((step, float(value)))
    return found


def _read_settings(path: Path) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Return the settings of the last attempt, differing values of earlier attempts, and notes."""
    files = sorted(path.glob("config*.yaml"), key=lambda file: (len(file.name), file.name))
    attempts, notes = [], []
    for file in files:
        try:
            loaded = yaml.safe_load(file.read_text(encoding="utf-8", errors="replace"))
            attempts.append(flat_settings(loaded) if isinstance(loaded, dict) else {})
        except yaml.YAMLError:
            notes.append(f"{file.name} cannot be read as YAML")
    if not attempts:
        return {}, {}, [*notes, "no config.yaml: the settings are unknown"]
    last, changed = attempts[-1], {}
    for earlier in reversed(attempts[:-1]):
        for key in {*earlier, *last} - {"run", "ckpt_path"}:
            if earlier.get(key) != last.get(key):
                changed[key] = earlier.get(key)
    return last, changed, notes


def flat_settings(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return a configuration by dotted names, with ``class_path`` and ``init_args`` removed from the names.

    >>> flat_settings({"task": {"class_path": "a.Sort", "init_args": {"digits": 3}}, "list": [{"class_path": "b.Log"}]})
    {'task': 'a.Sort', 'task.digits': 3, 'list[0]': 'b.Log'}
    """
    if isinstance(value, dict) and "class_path" in value:
        arguments = value.get("init_args") or {}
        rest = {k: v for k, v in value.items() if k not in ("class_path", "init_args")}
        return {prefix: value["class_path"]} | flat_settings({**arguments, **rest}, prefix)
    if isinstance(value, dict):
        dot = f"{prefix}." if prefix else ""
        return {k: v for key, item in value.items() for k, v in flat_settings(item, f"{dot}{key}").items()}
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return {k: v for i, item in enumerate(value) for k, v in flat_settings(item, f"{prefix}[{i}]").items()}
    return {prefix: value}


def _read_rows(path: Path, key: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rows of a JSON lines file, and notes on unreadable lines.

    If a resumed attempt repeats rollouts (or versions) of an earlier one, the rows of the later attempt count.
    """
    if not path.exists():
        return [], []
    rows: list[dict[str, Any]] = []
    num_broken = 0
    with path.open("rb") as file:
        for line in file:
            try:
                row = json.loads(line)
                count = row[key]
                if type(count) is not int:
                    raise TypeError
            except (ValueError, KeyError, TypeError):  # incomplete, or not a row
                num_broken += 1
                continue
            while rows and (rows[-1][key] > count or (rows[-1][key] == count and key == "version")):
                rows.pop()
            rows.append(row)
    lines = "a line" if num_broken == 1 else f"{num_broken} lines"
    return rows, [f"{path.name} has {lines} that cannot be read, left out here"] if num_broken else []
