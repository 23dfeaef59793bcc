"""The numbers a run left behind."""

from __future__ import annotations

import csv
from pathlib import Path

Series = dict[str, list[tuple[int, float]]]


def read_series(run: Path) -> Series:
    """Every metric of a run as (optimizer step, value) pairs.

    Each attempt at a run, the first and every resumed one, has a CSV file of its own under ``metrics/``; where two have
    the same step of a metric, the later attempt's value stands.
    """
    return read_metrics(run)[0]


def read_metrics(run: Path) -> tuple[Series, list[str]]:
    """``read_series``, and what could not be read: a run that goes on or crashed may leave a line cut short."""
    files = sorted(run.glob("metrics/version_*/metrics.csv"), key=_attempt)
    if not files:
        raise FileNotFoundError(f"{run} holds no metrics: there is no {run / 'metrics'}/version_*/metrics.csv")
    values: dict[str, dict[int, float]] = {}
    notes = []
    for path in files:
        rows, num_broken = _rows(path)
        for step, figures in rows:
            for name, value in figures.items():
                values.setdefault(name, {})[step] = value
        if num_broken:
            lines = "a line" if num_broken == 1 else f"{num_broken} lines"
            notes.append(f"{path.relative_to(run)} has {lines} cut short or garbled, left out here")
    return {name: sorted(points.items()) for name, points in values.items()}, notes


def closing_line(series: Series, seconds: float) -> str:
    """``pass@1 0.41 -> 0.92 in 140 s``."""
    points = series.get("val/pass@1", [])
    if not points:
        return f"no validation in {seconds:.0f} s"
    return f"pass@1 {points[0][1]:.2f} -> {points[-1][1]:.2f} in {seconds:.0f} s"


def _attempt(path: Path) -> int:
    number = path.parent.name.removeprefix("version_")
    return int(number) if number.isdigit() else -1


def _rows(path: Path) -> tuple[list[tuple[int, dict[str, float]]], int]:
    """Whole lines alone: of a number cut in two, the first half would read as a number too."""
    text = path.read_text(encoding="utf-8", errors="replace")
    whole, newline, rest = text.rpartition("\n")
    reader = csv.reader((whole + newline).splitlines())
    names = next(reader, [])
    if "step" not in names:
        return [], int(bool(text))
    place = names.index("step")
    rows, num_broken = [], int(bool(rest))
    for fields in reader:
        try:
            if len(fields) != len(names):
                raise ValueError
            figures = {n: float(f) for n, f in zip(names, fields, strict=True) if f and n not in ("step", "epoch")}
            rows.append((int(fields[place]), figures))
        except ValueError:
            num_broken += 1
    return rows, num_broken
