"""A run folder, read as far as it can be: one that goes on, crashed, or lacks a part is read too."""

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
    """What a run left behind."""

    path: Path
    name: str
    """The shortest end of its path that no other run on the page shares."""
    series: Series
    settings: dict[str, Any]
    """Every setting by its dotted name, as of the last attempt."""
    changed: dict[str, Any]
    """Of those that an earlier attempt had otherwise, what it had."""
    syncs: list[dict[str, Any]]
    completions: list[dict[str, Any]]
    written: float
    """When a metric was last written, in seconds since 1970."""
    notes: list[str] = field(default_factory=list)
    """What could not be read, in words."""

    @property
    def num_steps(self) -> int:
        """Optimizer steps that were logged."""
        return 1 + max((points[-1][0] for name, points in self.series.items() if name.startswith("train/")), default=-1)

    @property
    def planned_steps(self) -> int | None:
        """Optimizer steps the settings ask for, where they say it."""
        limits = []
        most, epochs = self.settings.get("trainer.max_steps"), self.settings.get("trainer.max_epochs")
        rollouts = self.settings.get("data.num_rollouts")
        if isinstance(most, int) and most >= 0:
            limits.append(most)
        if isinstance(epochs, int) and isinstance(rollouts, int) and epochs >= 0:
            limits.append(epochs * rollouts * self.reuse)
        return min(limits, default=None)

    @property
    def reuse(self) -> int:
        """i."""
        value = self.settings.get("data.reuse")
        return value if isinstance(value, int) and value > 0 else 1

    @property
    def task(self) -> str | None:
        """What is trained on: the task and all its settings."""
        own = {key: value for key, value in self.settings.items() if f"{key}.".startswith("data.task.")}
        if not own:
            return None
        name = str(own.pop("data.task", "")).rpartition(".")[2]
        given = ", ".join(
            f"{key.removeprefix('data.task.')}={value}" for key, value in own.items() if value is not None
        )
        return f"{name}({given})"


def read_runs(paths: Sequence[Path]) -> list[RunRecord]:
    """The runs of a page, each read for itself; an error where one is none."""
    known: dict[Path, Path] = {}
    for path in paths:
        _check_run(path)
        if path.resolve() in known:
            raise SystemExit(f"lgrpo: {path} and {known[path.resolve()]} are the same run: name each once")
        known[path.resolve()] = path
    return [_read_run(path, name) for path, name in zip(paths, _names(list(known)), strict=True)]


def _check_run(path: Path) -> None:
    if not path.exists():
        raise SystemExit(f"lgrpo: there is no run folder {path}")
    if not path.is_dir():
        raise SystemExit(f"lgrpo: {path} is a file; a report is made of the folder of a run")
    if any(path.glob("metrics/version_*/metrics.csv")):
        return
    inside = sorted({str(file.parents[2]) for file in path.glob("*/metrics/version_*/metrics.csv")})
    if inside:
        some = ", ".join(inside[:5]) + (" …" if len(inside) > 5 else "")
        raise SystemExit(f"lgrpo: {path} is not a run, but holds {len(inside)}: name them ({some})")
    raise SystemExit(
        f"lgrpo: {path} holds no metrics: there is no {path / 'metrics'}/version_*/metrics.csv. Did the run make a "
        "step yet, and does it log to CSV (trainer.logger)?"
    )


def _names(paths: Sequence[Path]) -> list[str]:
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _read_run(path: Path, name: str) -> RunRecord:
    series, notes = read_metrics(path)
    series = _of_checkpoints(path) | series
    for metric, points in series.items():
        if odd := [step for step, value in points if not math.isfinite(value)]:
            notes.append(f"{metric} is not finite at {len(odd)} of {len(points)} steps, first at step {odd[0]}")
    settings, changed, more = _settings(path)
    syncs, syncs_notes = _lines(path / "syncs.jsonl", "version")
    completions, completions_notes = _lines(path / "completions.jsonl", "rollout")
    if not completions and not completions_notes:
        completions_notes = ["no completions were written: the callback lgrpo.callbacks.RolloutLog does that"]
    return RunRecord(
        path=path,
        name=name,
        series=series,
        settings=settings,
        changed=changed,
        syncs=syncs,
        completions=completions,
        written=max(file.stat().st_mtime for file in path.glob("metrics/version_*/metrics.csv")),
        notes=[*notes, *more, *syncs_notes, *completions_notes],
    )


def _of_checkpoints(path: Path) -> Series:
    """What ``lgrpo test --checkpoints`` measured, as curves."""
    found: Series = {}
    for file in sorted(path.glob("evaluations/checkpoints-*.json")):
        try:
            table = {int(step): dict(figures) for step, figures in json.loads(file.read_bytes()).items()}
        except (ValueError, AttributeError, TypeError):  # being written, or somebody else's
            continue
        for step, figures in sorted(table.items()):
            for name, value in figures.items():
                if isinstance(value, float | int):
                    found.setdefault(str(name), []).append((step, float(value)))
    return found


def _settings(path: Path) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Of the last attempt; what an earlier one had otherwise; what could not be read."""
    files = sorted(path.glob("config*.yaml"), key=lambda file: (len(file.name), file.name))
    attempts, notes = [], []
    for file in files:
        try:
            loaded = yaml.safe_load(file.read_text(encoding="utf-8", errors="replace"))
            attempts.append(flat_settings(loaded) if isinstance(loaded, dict) else {})
        except yaml.YAMLError:
            notes.append(f"{file.name} cannot be read as YAML")
    if not attempts:
        return {}, {}, [*notes, "there is no config.yaml, so its settings are not known"]
    last, changed = attempts[-1], {}
    for earlier in reversed(attempts[:-1]):
        for key in {*earlier, *last} - {"run", "ckpt_path"}:
            if earlier.get(key) != last.get(key):
                changed[key] = earlier.get(key)
    return last, changed, notes


def flat_settings(value: Any, prefix: str = "") -> dict[str, Any]:
    """A configuration by dotted names, ``class_path`` and ``init_args`` folded away.

    >>> flat_settings({"task": {"class_path": "a.Sort", "init_args": {"digits": 3}}, "list": [{"class_path": "b.Log"}]})
    {'task': 'a.Sort', 'task.digits': 3, 'list[0]': 'b.Log'}
    """
    if isinstance(value, dict) and "class_path" in value:
        own = value.get("init_args") or {}
        rest = {k: v for k, v in value.items() if k not in ("class_path", "init_args")}
        return {prefix: value["class_path"]} | flat_settings({**own, **rest}, prefix)
    if isinstance(value, dict):
        dot = f"{prefix}." if prefix else ""
        return {k: v for key, item in value.items() for k, v in flat_settings(item, f"{dot}{key}").items()}
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return {k: v for i, item in enumerate(value) for k, v in flat_settings(item, f"{prefix}[{i}]").items()}
    return {prefix: value}


def _lines(path: Path, key: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows of a file of JSON lines; where an attempt begins again below an earlier one, the later rows stand."""
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
            except (ValueError, KeyError, TypeError):  # cut short, garbled, or no row at all
                num_broken += 1
                continue
            while rows and (rows[-1][key] > count or (rows[-1][key] == count and key == "version")):
                rows.pop()
            rows.append(row)
    lines = "a line" if num_broken == 1 else f"{num_broken} lines"
    return rows, [f"{path.name} has {lines} cut short or garbled, left out here"] if num_broken else []
