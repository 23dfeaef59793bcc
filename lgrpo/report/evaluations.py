"""The checkpoints of a run, and the metrics that ``lgrpo test --checkpoints`` measured for each."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path

_STATISTICS: dict[str, Callable[[list[float]], float]] = {
    "min": min,
    "max": max,
    "median": statistics.median,
    "mean": statistics.fmean,
}


def find_checkpoints(run: Path) -> dict[int, Path]:
    """Return the checkpoints of a run by optimizer step, in order; one path per step.

    A file named after its step is preferred to ``last.ckpt``.
    """
    folder = run / "checkpoints" if (run / "checkpoints").is_dir() else run
    paths = sorted(path for path in folder.glob("*.ckpt") if not path.name.startswith("last"))
    paths += sorted(folder.glob("last*.ckpt"))
    found: dict[int, Path] = {}
    for path in paths:
        found.setdefault(_step(path), path)
    if not found:
        raise SystemExit(f"lgrpo: there is no checkpoint in {folder}")
    return dict(sorted(found.items()))


def headlines(metrics: dict[str, float]) -> list[str]:
    """Return pass@1 of every task with its standard error, as text.

    >>> headlines({"test/pass@1": 0.5, "test/pass@1_stderr": 0.1, "test/pass@2": 0.7, "test/aime/pass@1": 0.25})
    ['test/pass@1 0.5000 ± 0.1000', 'test/aime/pass@1 0.2500']
    """
    return [f"{name} {with_error(metrics, name)}" for name in metrics if name.endswith("pass@1")]


def with_error(metrics: dict[str, float], name: str) -> str:
    """Return a metric with its standard error, if it has one, as text."""
    error = metrics.get(f"{name}_stderr")
    return f"{metrics[name]:.4f}" + ("" if error is None else f" ± {error:.4f}")


def write_summary(table: dict[int, dict[str, float]], path: Path) -> str:
    """Write the metrics of all checkpoints as JSON; return min, max, median and mean over them as a table."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({str(step): metrics for step, metrics in table.items()}, indent=1), encoding="utf-8")
    names = [n for n in dict.fromkeys(n for metrics in table.values() for n in metrics) if not n.endswith("_stderr")]
    width = max(len(name) for name in names)
    lines = [f"{'over ' + str(len(table)) + ' checkpoints':<{width}}" + "".join(f"{s:>9}" for s in _STATISTICS)]
    for name in names:
        values = [metrics[name] for metrics in table.values() if name in metrics]
        lines.append(f"{name:<{width}}" + "".join(f"{f(values):>9.4f}" for f in _STATISTICS.values()))
    return "\n".join([*lines, f"The metrics of every checkpoint are in {path}"])


def _step(path: Path) -> int:
    from lgrpo.run.checkpoints import saved_step  # here because the other functions of the package start faster without

    step = saved_step(path)
    if step is None:
        raise SystemExit(f"lgrpo: {path} cannot be read as a checkpoint")
    return step
