"""Run ``configs/demo.yaml`` with several seeds, one run at a time.

    python -m tests.benchmarks.demo --folder runs/demo_seeds          # seeds 0 to 4, resumable; three minutes each
    python -m tests.benchmarks.demo --report                          # table of all rows

Each run is ``lgrpo fit --config configs/demo.yaml --seed_everything SEED`` and appends a row to
``tests/benchmarks/results/demo.jsonl`` as soon as it ends, so an interrupted command continues with the other seeds.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lgrpo.report import read_series

ROOT = Path(__file__).parents[2]
ROWS = Path(__file__).parent / "results" / "demo.jsonl"


def train(seed: int, folder: Path, settings: list[str]) -> dict[str, Any]:
    """Run the demo with a seed and return its row."""
    run = folder / f"seed-{seed}-{time.time_ns()}"
    command = [sys.executable, "-m", "lgrpo.cli", "fit", f"--config={ROOT / 'configs' / 'demo.yaml'}", f"--run={run}"]
    start = time.perf_counter()
    subprocess.run([*command, f"--seed_everything={seed}", *settings], cwd=ROOT, check=True)
    seconds = time.perf_counter() - start
    series = read_series(run)
    return {
        "seed": seed,
        "pass@1": [[step, round(value, 4)] for step, value in series["val/pass@1"]],
        "pass@1_stderr": round(series["val/pass@1_stderr"][-1][1], 4),
        "steps": len(series["rollout/reward"]),
        "seconds": round(seconds, 1),
        "machine": platform.machine(),
    }


def read() -> list[dict[str, Any]]:
    return [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table, with their mean."""
    lines = ["| seed | pass@1 before | after | standard error | steps | seconds |", "|---:|---:|---:|---:|---:|---:|"]
    for row in sorted(rows, key=lambda row: row["seed"]):
        before, after = row["pass@1"][0][1], row["pass@1"][-1][1]
        cells = f"{before:.3f} | {after:.3f} | {row['pass@1_stderr']:.3f} | {row['steps']} | {row['seconds']:.0f}"
        lines.append(f"| {row['seed']} | {cells} |")
    if rows:
        before, after = (statistics.fmean(row["pass@1"][end][1] for row in rows) for end in (0, -1))
        lines.append(f"| mean | {before:.3f} | {after:.3f} | | | |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="Seeds to run.")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "demo_seeds", help="Folder for the runs.")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="More settings of lgrpo fit.")
    parser.add_argument("--report", action="store_true", help="Print the table and train nothing.")
    options = parser.parse_args()
    done = {row["seed"] for row in read()}
    for seed in () if options.report else options.seeds:
        if seed not in done:
            row = train(seed, options.folder.resolve(), [f"--{setting}" for setting in options.set])
            with ROWS.open("a") as file:
                file.write(json.dumps(row) + "\n")
    print(table(read()))


if __name__ == "__main__":
    main()
