"""Train the small models of the environments with several seeds, one run at a time.

    python -m tests.benchmarks.environments guess_number                  # seeds 0 to 4, resumable
    python -m tests.benchmarks.environments calculator no_tool
    python -m tests.benchmarks.environments --report                      # table of tutorials/pages/environments.md

Each run is ``lgrpo fit`` with the configs of its arm and ``--seed_everything SEED`` in one thread. It appends a row to
``tests/benchmarks/results/environments.jsonl`` as soon as it ends, so an interrupted command continues with the other
seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lgrpo.report import read_series
from tests.benchmarks.demo import cpu_seconds

ROOT = Path(__file__).parents[2]
ROWS = Path(__file__).parent / "results" / "environments.jsonl"
ARMS = {
    "guess_number": ["configs/guess_number.yaml"],
    "calculator": ["configs/calculator.yaml"],
    "no_tool": ["configs/calculator.yaml", "configs/no_tool.yaml"],
}
"""Configs of each arm."""
PAGE = ROOT / "tutorials" / "pages" / "environments.md"
BEGIN, END = "<!-- seeds -->", "<!-- end -->"


def train(arm: str, seed: int, folder: Path) -> dict[str, Any]:
    """Run the configs of an arm with a seed and return the row."""
    run = folder / f"{arm}-seed-{seed}-{time.time_ns()}"
    command = [sys.executable, "-m", "lgrpo.cli", "fit", *(f"--config={config}" for config in ARMS[arm])]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    load, used, start = os.getloadavg()[0], cpu_seconds(), time.perf_counter()
    subprocess.run([*command, f"--run={run}", f"--seed_everything={seed}"], cwd=ROOT, env=environment, check=True)
    seconds, used = time.perf_counter() - start, cpu_seconds() - used
    series = read_series(run)
    turns = [value for _, value in series.get("rollout/turns", [])]
    return {
        "arm": arm,
        "seed": seed,
        "pass@1": [[step, round(value, 4)] for step, value in series["val/pass@1"]],
        "turns": [round(statistics.fmean(part), 3) for part in (turns[:20], turns[-20:])] if turns else None,
        "steps": len(series["rollout/reward"]),
        "seconds": round(seconds, 1),
        "cpu_seconds": round(used, 1),
        "load": [round(load, 2), round(os.getloadavg()[0], 2)],
        "machine": platform.machine(),
    }


def read() -> list[dict[str, Any]]:
    return [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []


def table(rows: list[dict[str, Any]]) -> str:
    """Return pass@1 of each arm before and after training, with mean, extremes and CPU seconds, as Markdown."""
    lines = [
        "| configs | seeds | pass@1 before | after | lowest, highest | CPU seconds |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for arm, configs in ARMS.items():
        if not (own := [row for row in rows if row["arm"] == arm]):
            continue
        before, after = ([row["pass@1"][end][1] for row in own] for end in (0, -1))
        names = " + ".join(f"`{Path(config).name}`" for config in configs)
        seconds = statistics.fmean(row["cpu_seconds"] for row in own)
        lines.append(
            f"| {names} | {len(own)} | {statistics.fmean(before):.2f} | {statistics.fmean(after):.2f} | "
            f"{min(after):.2f}, {max(after):.2f} | {seconds:.0f} |"
        )
    return "\n".join(lines)


def with_table(page: str, text: str) -> str:
    """Return the page with the table between its markers."""
    head, _, rest = page.partition(BEGIN)
    return f"{head}{BEGIN}\n\n{text}\n\n{END}{rest.partition(END)[2]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arms", nargs="*", choices=[*ARMS, []], help="Arms to run.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="Seeds to run.")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "environments", help="Folder for the runs.")
    parser.add_argument("--report", action="store_true", help="Write the table to the page and train nothing.")
    options = parser.parse_args()
    done = {(row["arm"], row["seed"]) for row in read()}
    for arm in () if options.report else options.arms or ARMS:
        for seed in options.seeds:
            if (arm, seed) not in done:
                row = train(arm, seed, options.folder.resolve())
                with ROWS.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    if options.report:
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), table(read())), encoding="utf-8")
    print(table(read()))


if __name__ == "__main__":
    main()
