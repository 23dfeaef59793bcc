"""The results of a sweep as a table, a CSV file and a picture."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lgrpo.checks import nearest
from lgrpo.report import Interval, Series, mean_interval, paired_difference, read_series
from lgrpo.sweep.grid import Grid, SweepError
from lgrpo.sweep.runs import SweepRun

_READERS: dict[str, Callable[[list[float]], float]] = {
    "last": lambda values: values[-1],
    "max": max,
    "min": min,
    "mean": statistics.fmean,
}


@dataclass(kw_only=True)
class Results:
    """The metrics of every finished run."""

    grid: Grid
    series: dict[str, dict[int, Series]] = field(default_factory=dict)
    """Metrics by arm and seed."""

    @classmethod
    def read(cls, grid: Grid, runs: Sequence[SweepRun]) -> Results:
        """Read the metrics of the finished runs; raise if one did not log a metric of the grid."""
        results = cls(grid=grid)
        for run in runs:
            if run.state == "finished":
                series = read_series(run.folder)
                for metric in grid.metrics:
                    if metric not in series:
                        hint = nearest(metric, sorted(series))
                        raise SweepError(f"the run {run.folder} logged no {metric}{hint}")
                results.series.setdefault(run.arm.name, {})[run.seed] = series
        return results

    def values(self, arm: str, metric: str) -> dict[int, float]:
        """Return the value of a metric for each seed of an arm, such as the last one."""
        read = _READERS[self.grid.value]
        return {seed: read([value for _, value in series[metric]]) for seed, series in self.series.get(arm, {}).items()}

    def mean(self, arm: str, metric: str) -> Interval | None:
        """Return the mean over the seeds of an arm; None if no run finished."""
        values = list(self.values(arm, metric).values())
        return mean_interval(values, self.grid.confidence) if values else None

    def difference(self, arm: str, metric: str) -> Interval | None:
        """Return the mean difference from the baseline, paired by seed; None if no seed is in both."""
        baseline = self.values(self.grid.baseline, metric)
        return paired_difference(self.values(arm, metric), baseline, self.grid.confidence)

    def table(self, metric: str) -> str:
        """Return a Markdown table with one row per arm."""
        percent = f"{self.grid.confidence:.0%}"
        rows = [(f"{metric} ({self.grid.value})", "seeds", f"mean ± {percent}", f"less baseline ± {percent}")]
        for arm in self.grid.arms:
            mean, difference = self.mean(arm.name, metric), self.difference(arm.name, metric)
            shown = "baseline" if arm.name == self.grid.baseline else "" if difference is None else str(difference)
            rows.append((arm.name, str(mean.count if mean else 0), str(mean or "no run finished"), shown))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in rows]
        return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])

    def write_csv(self, path: Path) -> None:
        """Write one line per run."""
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["arm", "seed", *self.grid.metrics])
            for arm in self.grid.arms:
                columns = [self.values(arm.name, metric) for metric in self.grid.metrics]
                for seed in columns[0]:
                    writer.writerow([arm.name, seed, *(values[seed] for values in columns)])


def draw_results(results: Results, path: Path) -> None:
    """Write a PNG with one row per metric: curves over steps, means over seeds, differences from the baseline."""
    try:
        import matplotlib
        from matplotlib.figure import Figure  # not pyplot, which changes the backend of notebooks
    except ImportError as error:
        raise ImportError("the picture needs matplotlib: pip install 'lgrpo[tutorials]'") from error
    grid = results.grid
    arms = [arm.name for arm in grid.arms if arm.name in results.series]
    colours = dict(zip(arms, (matplotlib.colormaps["tab10"](i % 10) for i in range(len(arms))), strict=True))
    height = max(2.6, 0.36 * len(arms) + 1.4)
    figure = Figure(figsize=(13, height * len(grid.metrics) + 0.3), layout="constrained")
    axes = figure.subplots(len(grid.metrics), 3, width_ratios=(5, 4, 4), squeeze=False)
    for metric, (left, middle, right) in zip(grid.metrics, axes, strict=True):
        for arm in arms:
            _draw_curve(left, results, arm, metric, colours[arm])
        left.set(xlabel="optimizer step", ylabel=metric, title="over the run")
        left.xaxis.get_major_locator().set_params(integer=True)
        left.legend(frameon=False, fontsize="small")
        means = {arm: results.mean(arm, metric) for arm in arms}
        dots = {arm: results.values(arm, metric) for arm in arms}
        _draw_intervals(middle, means, dots, colours)
        middle.set(xlabel=f"{metric} ({grid.value})", title=f"mean and {grid.confidence:.0%} interval, dots are seeds")
        baseline = results.values(grid.baseline, metric)
        differences = {arm: None if arm == grid.baseline else results.difference(arm, metric) for arm in arms}
        pairs = {
            arm: {seed: dots[arm][seed] - baseline[seed] for seed in dots[arm].keys() & baseline.keys()}
            for arm in arms
            if arm != grid.baseline
        }
        _draw_intervals(right, differences, pairs, colours)
        right.tick_params(labelleft=False)  # the middle panel has the same rows
        right.axvline(0, color="black", linewidth=0.8)
        right.set(xlabel="difference, paired by seed", title=f"less {grid.baseline}")
        for axis in (left, middle, right):
            axis.grid(alpha=0.3)
            axis.title.set_fontsize("medium")
    figure.savefig(path, dpi=120)


def _draw_curve(axis: Any, results: Results, arm: str, metric: str, colour: Any) -> None:
    """Draw the mean over seeds, with its interval, at the steps that all seeds have."""
    curves = [dict(series[metric]) for series in results.series[arm].values()]
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    points = [mean_interval([curve[step] for curve in curves], results.grid.confidence) for step in steps]
    means = [point.mean for point in points]
    axis.plot(steps, means, "o-" if len(steps) < 20 else "-", color=colour, label=arm, markersize=3, linewidth=1.5)
    if len(curves) > 1:
        lower = [point.mean - point.half_width for point in points]
        upper = [point.mean + point.half_width for point in points]
        axis.fill_between(steps, lower, upper, color=colour, alpha=0.15, linewidth=0)


def _draw_intervals(
    axis: Any, intervals: dict[str, Interval | None], dots: dict[str, dict[int, float]], colours: dict[str, Any]
) -> None:
    """Draw one row per arm: a dot per seed, and the mean with its interval."""
    names = list(intervals)
    for row, name in enumerate(names):
        values = list(dots.get(name, {}).values())
        axis.plot(values, [row] * len(values), ".", color=colours[name], alpha=0.4, markersize=7)
        if (interval := intervals[name]) is not None:
            width = interval.half_width if interval.count > 1 else 0.0
            axis.errorbar(interval.mean, row, xerr=width, fmt="o", color=colours[name], capsize=4)
    axis.set_yticks(range(len(names)), names, fontsize="small")
    axis.set_ylim(len(names) - 0.5, -0.5)
