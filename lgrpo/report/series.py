"""The metrics of a run, read from its CSV files."""

from __future__ import annotations

import csv
from pathlib import Path

Series = dict[str, list[tuple[int, float]]]
"""(optimizer step, value) pairs in order, by name of the metric."""
CLOCK = "time/clock"
"""Metric that counts the seconds of an attempt."""


def read_series(run: Path) -> Series:
    """Return every metric of a run.

    Each attempt at a run (the first and every resumed one) writes one CSV file under ``metrics/``. If two attempts
    logged the same step of a metric, the value of the later attempt counts.
    """
    return read_metrics(run)[0]


def read_metrics(run: Path) -> tuple[Series, list[str], list[int]]:
    """Return the metrics as ``read_series`` does, notes on lines that could not be read, and where attempts begin.

    The last is the first step of each attempt whose values count, by the steps that have ``time/clock``.

    A run that is in progress or crashed may leave an incomplete line.
    """
    files = sorted(run.glob("metrics/version_*/metrics.csv"), key=_attempt)
    if not files:
        raise FileNotFoundError(f"{run} contains no metrics: there is no {run / 'metrics'}/version_*/metrics.csv")
    values: dict[str, dict[int, float]] = {}
    notes, starts = [], list[int]()
    for path in files:
        rows, num_broken = _rows(path)
        for step, metrics in rows:
            for name, value in metrics.items():
                values.setdefault(name, {})[step] = value
        if clocked := [step for step, metrics in rows if CLOCK in metrics]:
            starts = [*(step for step in starts if step < min(clocked)), min(clocked)]
        if num_broken:
            lines = "a line" if num_broken == 1 else f"{num_broken} lines"
            notes.append(f"{path.relative_to(run)} has {lines} that cannot be read, left out here")
    return {name: sorted(points.items()) for name, points in values.items()}, notes, starts


def closing_line(series: Series, seconds: float) -> str:
    """Return a summary such as ``pass@1 0.41 -> 0.92 in 140 s``."""
    points = series.get("val/pass@1", [])
    if not points:
        return f"no validation in {seconds:.0f} s"
    return f"pass@1 {points[0][1]:.2f} -> {points[-1][1]:.2f} in {seconds:.0f} s"


def _attempt(path: Path) -> int:
    number = path.parent.name.removeprefix("version_")
    return int(number) if number.isdigit() else -1


def _rows(path: Path) -> tuple[list[tuple[int, dict[str, float]]], int]:
    """Return (step, metrics) of each line, and the number of unreadable lines.

    Text after the last newline is not parsed: an incomplete number would read as a different number.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    whole, newline, rest = text.rpartition("\n")
    reader = csv.reader((whole + newline).splitlines())
    names = next(reader, [])
    if "step" not in names:
        return [], int(bool(text))
    step_index = names.index("step")
    rows, num_broken = [], int(bool(rest))
    for fields in reader:
        try:
            if len(fields) != len(names):
                raise ValueError
            metrics = {n: float(f) for n, f in zip(names, fields, strict=True) if f and n not in ("step", "epoch")}
            rows.append((int(fields[step_index]), metrics))
        except ValueError:
            num_broken += 1
    return rows, num_broken
