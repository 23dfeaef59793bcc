"""The plot of a simulation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.simulation.outcome import Prediction

_COLOURS = {"sync": "black", "overhead": "silver", "generate": "skyblue", "update": "sandybrown"}
_NAMES = {"sync": "sync", "overhead": "wake and sleep", "generate": "generate", "update": "update"}


def draw(predictions: Sequence[Prediction], path: Path) -> None:
    """Write a PNG: step time and idle share over v, a column per number of GPUs; below, one cycle on a time axis."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("drawing needs matplotlib: pip install 'lgrpo[tutorials]'") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    sizes = sorted({each.layout.num_gpus for each in predictions})
    layouts = list(dict.fromkeys(each.layout.name for each in predictions))
    colours = dict(zip(layouts, (plt.get_cmap("tab10")(i % 10) for i in range(len(layouts))), strict=True))
    cycles = _cycles(predictions)
    figure = plt.figure(figsize=(max(7.0, 4 * len(sizes)), 6.4 + 0.5 * len(cycles)), layout="constrained")
    grid = figure.add_gridspec(3, len(sizes), height_ratios=(3, 3, 0.8 + 0.5 * len(cycles)))
    for column, size in enumerate(sizes):
        above, below = figure.add_subplot(grid[0, column]), figure.add_subplot(grid[1, column])
        for layout in layouts:
            points = [e for e in predictions if e.layout.num_gpus == size and e.layout.name == layout]
            periods = [str(e.schedule.period) for e in points]
            above.plot(periods, [e.step_seconds for e in points], "o-", color=colours[layout], label=layout)
            below.plot(periods, [e.gpu_idle for e in points], "o-", color=colours[layout], label=layout)
        above.set(title=f"{size} GPU{'s' * (size > 1)}", ylabel="seconds per rollout" if column == 0 else "")
        above.set_ylim(bottom=0)
        below.set(xlabel="v", ylabel="idle share of the GPUs" if column == 0 else "", ylim=(0, 1))
        below.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1))
        for axis in (above, below):
            axis.grid(alpha=0.3)
        if column == len(sizes) - 1:
            above.legend(frameon=False, fontsize="small")
    _draw_cycles(figure.add_subplot(grid[2, :]), cycles)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _cycles(predictions: Sequence[Prediction]) -> list[Prediction]:
    """Return every layout on the largest number of GPUs at one v: the largest up to 4, so that stages stay visible."""
    size = max(each.layout.num_gpus for each in predictions)
    largest = [each for each in predictions if each.layout.num_gpus == size]
    periods = sorted({each.schedule.period for each in largest})
    period = max([p for p in periods if p <= 4], default=periods[0])
    return [each for each in largest if each.schedule.period == period]


def _draw_cycles(axis: Any, cycles: Sequence[Prediction]) -> None:
    seen: set[str] = set()
    rows = []
    for each in cycles:
        is_separate = each.layout.num_servers > 0
        rows += [f"{each.layout.name}: servers", f"{each.layout.name}: trainers"] if is_separate else [each.layout.name]
        start = each.spans[0].start
        for span in each.spans:
            row = len(rows) - (2 if is_separate and span.stage == "generate" else 1)
            label = None if span.stage in seen else _NAMES[span.stage]
            seen.add(span.stage)
            left, width = span.start - start, span.end - span.start
            axis.barh(row, width, left=left, color=_COLOURS[span.stage], edgecolor="white", height=0.8, label=label)
    axis.set_yticks(range(len(rows)), rows, fontsize="small")
    axis.invert_yaxis()
    period, size = cycles[0].schedule.period, cycles[0].layout.num_gpus
    axis.set(xlabel="seconds", title=f"one cycle of v = {period} on {size} GPU{'s' * (size > 1)}")
    axis.legend(frameon=False, fontsize="small", ncols=4, loc="upper left", bbox_to_anchor=(0, -0.25))
