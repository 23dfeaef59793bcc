"""Run ``configs/demo.yaml`` with several seeds, one run at a time.

    python -m tests.benchmarks.demo --folder runs/demo_seeds          # seeds 0 to 4, resumable; three minutes each
    python -m tests.benchmarks.demo --seeds 0 --busy 1                # beside a process that keeps a core busy
    python -m tests.benchmarks.demo --report                          # table of all rows

Each run is ``lgrpo fit --config configs/demo.yaml --seed_everything SEED`` in one thread, as in ``make demo``. It
appends a row to ``tests/benchmarks/results/demo.jsonl`` as soon as it ends, so an interrupted command continues with
the other seeds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lgrpo.report import read_series

ROOT = Path(__file__).parents[2]
ROWS = Path(__file__).parent / "results" / "demo.jsonl"


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Keep ``count`` cores busy."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def cpu_seconds() -> float:
    """Return the CPU time of all processes that were started from here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def train(seed: int, busy: int, folder: Path, settings: list[str]) -> dict[str, Any]:
    """Run the demo with a seed beside ``busy`` other processes and return its row."""
    run = folder / f"seed-{seed}-{time.time_ns()}"
    command = [sys.executable, "-m", "lgrpo.cli", "fit", f"--config={ROOT / 'configs' / 'demo.yaml'}", f"--run={run}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    load_before, cpu_before, start = os.getloadavg()[0], cpu_seconds(), time.perf_counter()
    with busy_processes(busy):
        subprocess.run([*command, f"--seed_everything={seed}", *settings], cwd=ROOT, env=environment, check=True)
        seconds, used = time.perf_counter() - start, cpu_seconds() - cpu_before
    series = read_series(run)
    return {
        "seed": seed,
        "pass@1": [[step, round(value, 4)] for step, value in series["val/pass@1"]],
        "pass@1_stderr": round(series["val/pass@1_stderr"][-1][1], 4),
        "steps": len(series["rollout/reward"]),
        "seconds": round(seconds, 1),
        "cpu_seconds": round(used, 1),
        "busy": busy,
        "load": [round(load_before, 2), round(os.getloadavg()[0], 2)],
        "machine": platform.machine(),
    }


def read() -> list[dict[str, Any]]:
    return [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table, with the mean of those without busy processes."""
    columns = (
        "seed",
        "pass@1 before",
        "after",
        "standard error",
        "steps",
        "seconds",
        "CPU seconds",
        "busy processes",
        "load",
    )
    lines = [f"| {' | '.join(columns)} |", "|---:" * len(columns) + "|"]
    for row in sorted(rows, key=lambda row: (row["busy"], row["seed"])):
        before, after = row["pass@1"][0][1], row["pass@1"][-1][1]
        cells = f"{before:.3f} | {after:.3f} | {row['pass@1_stderr']:.3f} | {row['steps']} | {row['seconds']:.0f}"
        load = " to ".join(map(str, row.get("load", "?")))
        cells += f" | {row.get('cpu_seconds', '?')} | {row['busy']} | {load}"
        lines.append(f"| {row['seed']} | {cells} |")
    if alone := [row for row in rows if not row["busy"]]:
        before, after = (statistics.fmean(row["pass@1"][end][1] for row in alone) for end in (0, -1))
        lines.append(f"| mean | {before:.3f} | {after:.3f} | | | | | | |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="Seeds to run.")
    parser.add_argument("--busy", type=int, default=0, help="Number of other processes that keep a core busy.")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "demo_seeds", help="Folder for the runs.")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="More settings of lgrpo fit.")
    parser.add_argument("--report", action="store_true", help="Print the table and train nothing.")
    options = parser.parse_args()
    done = {(row["seed"], row["busy"]) for row in read()}
    for seed in () if options.report else options.seeds:
        if (seed, options.busy) not in done:
            row = train(seed, options.busy, options.folder.resolve(), [f"--{setting}" for setting in options.set])
            with ROWS.open("a") as file:
                file.write(json.dumps(row) + "\n")
    print(table(read()))


if __name__ == "__main__":
    main()
