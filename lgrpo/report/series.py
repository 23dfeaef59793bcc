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
    files = sorted(run.glob("metrics/version_*/metrics.csv"), key=lambda path: int(path.parent.name.split("_")[1]))
    if not files:
        raise FileNotFoundError(f"{run} holds no metrics: there is no {run / 'metrics'}/version_*/metrics.csv")
    values: dict[str, dict[int, float]] = {}
    for path in files:
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                for name, text in row.items():
                    if text and name not in ("step", "epoch"):
                        values.setdefault(name, {})[int(row["step"])] = float(text)
    return {name: sorted(points.items()) for name, points in values.items()}


def closing_line(series: Series, seconds: float) -> str:
    """``pass@1 0.41 -> 0.92 in 140 s``."""
    points = series.get("val/pass@1", [])
    if not points:
        return f"no validation in {seconds:.0f} s"
    return f"pass@1 {points[0][1]:.2f} -> {points[-1][1]:.2f} in {seconds:.0f} s"
