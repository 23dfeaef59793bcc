"""The checkpoints of a run, and the table of how each fares."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch

_STATISTICS: dict[str, Callable[[list[float]], float]] = {
    "min": min,
    "max": max,
    "median": statistics.median,
    "mean": statistics.fmean,
}


def find_checkpoints(run: Path) -> dict[int, Path]:
    """Every checkpoint of a run by its optimizer step, in order; of several at one step, one."""
    folder = run / "checkpoints" if (run / "checkpoints").is_dir() else run
    paths = sorted(path for path in folder.glob("*.ckpt") if not path.name.startswith("last"))
    paths += sorted(folder.glob("last*.ckpt"))  # where its step has a file of its own, that is taken
    found: dict[int, Path] = {}
    for path in paths:
        found.setdefault(_step(path), path)
    if not found:
        raise SystemExit(f"lgrpo: there is no checkpoint in {folder}")
    return dict(sorted(found.items()))


def headlines(figures: dict[str, float]) -> list[str]:
    """pass@1 of every task, with its standard error.

    >>> headlines({"test/pass@1": 0.5, "test/pass@1_stderr": 0.1, "test/pass@2": 0.7, "test/aime/pass@1": 0.25})
    ['test/pass@1 0.5000 ± 0.1000', 'test/aime/pass@1 0.2500']
    """
    found = []
    for name, value in figures.items():
        if name.endswith("pass@1"):
            error = figures.get(f"{name}_stderr")
            found.append(f"{name} {value:.4f}" + ("" if error is None else f" ± {error:.4f}"))
    return found


def write_summary(table: dict[int, dict[str, float]], path: Path) -> str:
    """The figures of all checkpoints as JSON on disk; min, max, median and mean over them as a table."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({str(step): figures for step, figures in table.items()}, indent=1), encoding="utf-8")
    names = [n for n in dict.fromkeys(n for figures in table.values() for n in figures) if not n.endswith("_stderr")]
    width = max(len(name) for name in names)
    lines = [f"{'over ' + str(len(table)) + ' checkpoints':<{width}}" + "".join(f"{s:>9}" for s in _STATISTICS)]
    for name in names:
        values = [figures[name] for figures in table.values() if name in figures]
        lines.append(f"{name:<{width}}" + "".join(f"{f(values):>9.4f}" for f in _STATISTICS.values()))
    return "\n".join([*lines, f"Every checkpoint's figures are in {path}"])


def _step(path: Path) -> int:
    try:
        return int(torch.load(path, map_location="meta", weights_only=True, mmap=True)["global_step"])
    except Exception as error:
        raise SystemExit(f"lgrpo: {path} is no checkpoint that can be read ({type(error).__name__})") from error
