"""Runs that differ by their seed only, as one curve: mean and interval."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lgrpo.report.downsample import Points
from lgrpo.report.intervals import t_quantile
from lgrpo.report.record import RunRecord
from lgrpo.report.series import Series
from lgrpo.report.timeline import clock

SEEDS = ("seed_everything", "data.seed")
NOT_COMPARED = (*SEEDS, "run", "ckpt_path", "trainer.default_root_dir", "checkpoint.dirpath")
"""Settings that may differ between the runs of a group."""


@dataclass(kw_only=True)
class SeedGroup:
    """Runs with the same settings."""

    name: str
    """Settings that differ from other groups, and the number of runs."""
    members: list[int]
    """Indices of the runs on the page."""
    runs: list[RunRecord]

    @property
    def series(self) -> Series:
        """Means over the runs at the steps that all of them logged.

        ``NAME_stderr`` is the half-width of the 95 % t-interval over runs, divided by 1.96. A single run keeps its own.
        """
        if len(self.runs) == 1:
            return self.runs[0].series
        names = set.intersection(*(set(run.series) for run in self.runs))
        found: Series = {}
        for name in sorted(name for name in names if not name.endswith("_stderr")):
            table = _at_common_steps([run.series[name] for run in self.runs])
            factor = t_quantile(0.95, len(self.runs) - 1) / math.sqrt(len(self.runs)) / 1.96
            found[name] = [(step, statistics.fmean(values)) for step, values in table]
            found[f"{name}_stderr"] = [(step, factor * statistics.stdev(values)) for step, values in table]
        return found

    @property
    def clock(self) -> Points:
        """Mean training time at each step."""
        return [(step, statistics.fmean(values)) for step, values in _at_common_steps([clock(r) for r in self.runs])]


def seed_groups(runs: Sequence[RunRecord]) -> list[SeedGroup]:
    """Return the runs grouped by their settings without the seed; empty if no two runs differ in the seed only.

    Runs with the same seed too, such as those of two versions of the code, are not grouped.
    """
    groups: dict[str, list[int]] = {}
    for index, run in enumerate(runs):
        groups.setdefault(json.dumps(_compared(run), default=str) if run.settings else f"run {index}", []).append(index)
    seeds_of = [{str([runs[index].settings.get(key) for key in SEEDS]) for index in own} for own in groups.values()]
    if any(len(seeds) < len(own) for seeds, own in zip(seeds_of, groups.values(), strict=True)):
        return []
    if len(groups) == len(runs):
        return []
    first = [_compared(runs[members[0]]) for members in groups.values()]
    keys = [key for key in dict.fromkeys(k for settings in first for k in settings) if _differs(key, first)]
    found = []
    for members, settings in zip(groups.values(), first, strict=True):
        name = ", ".join(f"{key}={settings.get(key)}" for key in keys) if len(keys) <= 3 else runs[members[0]].name
        seeds = f"{len(members)} seeds" if len(members) > 1 else "1 seed"
        shown = f"{name} ({seeds})" if name else seeds
        found.append(SeedGroup(name=shown, members=members, runs=[runs[index] for index in members]))
    return found


def _compared(run: RunRecord) -> dict[str, Any]:
    return {key: value for key, value in sorted(run.settings.items()) if key not in NOT_COMPARED}


def _differs(key: str, settings: Sequence[dict[str, Any]]) -> bool:
    return any(other.get(key) != settings[0].get(key) for other in settings)


def _at_common_steps(curves: Sequence[Points]) -> list[tuple[int, list[float]]]:
    """Return the values of all curves at the steps that all have, where they are finite."""
    tables = [dict(points) for points in curves]
    steps = sorted(set.intersection(*(set(table) for table in tables)))
    rows = [(step, [table[step] for table in tables]) for step in steps]
    return [(step, values) for step, values in rows if all(map(math.isfinite, values))]
