"""Find out whether lgrpo became slower: ``python -m tests.benchmarks.check NEW.jsonl [KEPT.jsonl]``.

Compares the rows of the last command in a file of ``tests.benchmarks.step`` with the shown rows of the kept file. On a
CPU seconds depend on the load, so only ratios within one run are compared: speed and memory relative to TRL, the
framework's share of a step, and the growth of a step along a sweep. On a GPU of the same kind, so are lgrpo's seconds
per token. Exits with 1 if one of them is worse by more than the tolerance, and with 2 if there is nothing to compare.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from tests.benchmarks.step import RESULTS, SWEEPS, read_rows

SAME = ("workload", "v", "prompts", "group", "prompt_tokens", "completion_tokens", "mean_tokens", "cap_tokens")
OWN_SHARE = 0.05
"""Tolerance of the framework's share of a step."""


def ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return every number that can be compared, by a name that describes it; higher is worse.

    Of several rows with the same name the last counts. Rows with a handicap of TRL are not compared with TRL, nor is
    memory of less than all processes.
    """
    found, first = dict[str, float](), dict[tuple[str, str, str], float]()
    for run in rows:
        settings = run["settings"]
        name = f"{run['device']}, {run['model']}, {settings['workload']} lengths"
        name += "".join(f", {field} {settings[field]}" for field in SAME[1:] if settings.get(field) is not None)
        ours, peer = run.get("lgrpo", {}), run.get("trl", {})
        if "step_seconds" in ours and "step_seconds" in peer and "handicap" not in run:
            each = [times["step_seconds"] / times["trained_tokens"] for times in (ours, peer)]
            found[f"time of a step over TRL's: {name}"] = each[0] / each[1]
            if "peak_gib" in ours and "peak_gib" in peer and "memory" not in run:
                found[f"memory over TRL's: {name}"] = ours["peak_gib"] / peer["peak_gib"]
        if "trained_tokens" in ours and run["device"] == "cuda":
            per_million = ours["step_seconds"] / ours["trained_tokens"] * 1e6
            found[f"seconds per million tokens on {run['machine']}: {name}"] = per_million
        if "own_share" in ours:
            found[f"own share of a step: {name}"] = ours["own_share"]
        if (sweep := run.get("sweep")) in SWEEPS and "step_seconds" in ours:
            start = first.setdefault((sweep, run["device"], run["model"]), ours["step_seconds"])
            if start != ours["step_seconds"]:
                found[f"time of a step over the first of the sweep of {sweep}: {name}"] = ours["step_seconds"] / start
    return found


def worse(new: dict[str, float], kept: dict[str, float], tolerance: float) -> list[str]:
    """Return one line for each ratio that became worse."""
    lines = []
    for name in sorted(new.keys() & kept.keys()):
        is_share = name.startswith("own share")
        limit = kept[name] + OWN_SHARE if is_share else kept[name] * (1 + tolerance)
        if new[name] > limit:
            lines.append(f"{name}: {new[name]:.3f}, was {kept[name]:.3f}, limit {limit:.3f}")
    return lines


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("new", type=Path)
    parser.add_argument("kept", type=Path, nargs="?", default=RESULTS / "step.jsonl", help="kept rows to compare with")
    parser.add_argument("--tolerance", type=float, default=0.15, help="share by which a ratio may be worse")
    options = parser.parse_args(arguments)
    kept = options.kept
    for path in (options.new, kept):
        if not path.exists():
            print(f"there is no {path}")
            return 2
    if not (rows := read_rows(options.new)):
        print(f"{options.new} has no rows")
        return 2
    new = ratios([row for row in rows if row["command"] == rows[-1]["command"]])
    old = ratios([row for row in read_rows(kept) if row.get("shown")])
    if not (common := new.keys() & old.keys()):
        print(f"{options.new} and {kept} have no run in common: the settings differ")
        return 2
    lines = worse(new, old, options.tolerance)
    print(*lines, f"{len(common)} ratios compared with {kept.name}, {len(lines)} worse", sep="\n")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
