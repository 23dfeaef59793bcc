"""Train the small models of the environments with several seeds.

    python -m tests.benchmarks.environments                               # all arms, seeds 0 to 4; resumable
    python -m tests.benchmarks.environments guess_number --seeds 0 1
    python -m tests.benchmarks.environments --workers 16 --commit COMMIT --rows new.jsonl      # in a copy without git
    python -m tests.benchmarks.environments --report --rows new.jsonl     # add these rows to the stored ones
    python -m tests.benchmarks.environments --report                      # tables of tutorials/pages/environments.md

Each run is ``lgrpo fit`` with the configs of its arm and ``--seed_everything SEED`` in one thread. It appends a row to
``tests/benchmarks/results/environments.jsonl`` as soon as it ends, so an interrupted command continues with the other
seeds. A run that fails has a row with its error, and is repeated by the next command.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from lgrpo.report import read_series
from lgrpo.report.intervals import mean_interval, paired_difference
from tests.benchmarks.demo import cpu_seconds

ROOT = Path(__file__).parents[2]
ROWS = Path(__file__).parent / "results" / "environments.jsonl"
SEEDS = range(5)
LAST = 20
"""Number of rollouts at each end of a run whose metrics are averaged."""
ARMS = {
    "guess_number": ["guess_number"],
    "guess_number_turns": ["guess_number", "turn_advantage"],
    "calculator": ["calculator"],
    "calculator_turns": ["calculator", "turn_advantage"],
    "no_tool": ["calculator", "no_tool"],
}
"""Configs of each arm."""
COMPARISONS = {"guess_number_turns": "guess_number", "calculator_turns": "calculator", "no_tool": "calculator"}
"""Arm with an overlay: the arm without it."""
PAGE = ROOT / "tutorials" / "pages" / "environments.md"
MARKERS = {"seeds": ("guess_number", "calculator", "no_tool"), "turns": tuple(ARMS)[:4]}
"""Name of a table on the page: its arms."""

Row = dict[str, Any]


def train(arm: str, seed: int, folder: Path, settings: Sequence[str] = ()) -> Row:
    """Run the configs of an arm with a seed and return the row; one with ``error`` if the run failed."""
    folder.mkdir(parents=True, exist_ok=True)
    run = folder / f"{arm}-seed-{seed}-{time.time_ns()}"
    configs = [f"--config={ROOT / 'configs' / name}.yaml" for name in ARMS[arm]]
    command = [sys.executable, "-m", "lgrpo.cli", "fit", *configs, f"--run={run}", f"--seed_everything={seed}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    load, used, start = os.getloadavg()[0], cpu_seconds(), time.perf_counter()
    output, row = run.with_suffix(".log"), {"arm": arm, "seed": seed}
    with output.open("wb") as file:
        arguments = [*command, *(f"--{setting}" for setting in settings)]
        status = subprocess.run(arguments, cwd=ROOT, env=environment, stdout=file, stderr=file).returncode
    seconds, used = time.perf_counter() - start, cpu_seconds() - used
    if status != 0:
        lines = output.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return row | {"error": f"{lines[-1] if lines else 'no output'} (exit status {status}, {output})"}
    series = read_series(run)
    metrics = {name: [value for _, value in series.get(f"rollout/{name}", [])] for name in ("turns", "reward")}
    ends = {name: [values[:LAST], values[-LAST:]] for name, values in metrics.items() if values}
    return row | {
        "pass@1": [[step, round(value, 4)] for step, value in series["val/pass@1"]],
        **{name: [round(statistics.fmean(part), 3) for part in parts] for name, parts in ends.items()},
        "steps": len(metrics["reward"]),
        "seconds": round(seconds, 1),
        "cpu_seconds": round(used, 1),
        "load": [round(load, 2), round(os.getloadavg()[0], 2)],
    }


def origin(commit: str | None) -> Row:
    """Return what the rows of a command share: commit, machine, number of parallel runs and versions of packages."""
    from tests.benchmarks.step import commit as current_commit
    from tests.benchmarks.step import machine_name

    packages = ("torch", "lightning", "transformers")
    versions = {"python": sys.version.split()[0]} | {name: importlib.metadata.version(name) for name in packages}
    return {"commit": commit or current_commit(), "machine": machine_name("cpu"), "versions": versions}


def read(path: Path) -> list[Row]:
    """Return the newest row of each arm and seed, in the order of the arms and seeds."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    newest = {(row["arm"], row["seed"]): row for row in map(json.loads, lines)}
    return [newest[key] for key in sorted(newest, key=lambda key: (list(ARMS).index(key[0]), key[1]))]


def launch(
    path: Path, arms: Sequence[str], seeds: Sequence[int], workers: int, folder: Path, shared: Row, settings: list[str]
) -> None:
    """Run what has no row yet, several runs at a time, and append a row for each as soon as it ends."""
    done = {(row["arm"], row["seed"]) for row in read(path) if "error" not in row}
    jobs = [(arm, seed) for arm in arms for seed in seeds if (arm, seed) not in done]
    path.parent.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(train, arm, seed, folder, settings) for arm, seed in jobs]
        for count, future in enumerate(as_completed(futures), start=1):
            row = future.result() | shared | {"workers": workers} | ({"settings": settings} if settings else {})
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
            end = row.get("error") or f"pass@1 {row['pass@1'][-1][1]:.3f} in {row['seconds']:.0f} s"
            print(f"{count} of {len(jobs)}: {row['arm']}, seed {row['seed']}: {end}", flush=True)


def merge(path: Path, stored: Path) -> None:
    """Add the rows of a file to stored ones; they replace those of the same arm and seed."""
    added = read(path)
    if unfit := [f"{row['arm']} {row['seed']}" for row in added if "error" in row or "settings" in row]:
        raise SystemExit(f"{path} has rows that failed or have other settings: {', '.join(unfit)}; remove them first.")
    rows = {(row["arm"], row["seed"]): row for row in (*read(stored), *added)}
    stored.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows.values()), encoding="utf-8")


def by_arm(rows: Sequence[Row]) -> dict[str, dict[int, Row]]:
    """Return the rows that did not fail by arm and seed."""
    return {arm: {row["seed"]: row for row in rows if row["arm"] == arm and "error" not in row} for arm in ARMS}


def named(arm: str) -> str:
    """Return the configs of an arm."""
    return " + ".join(f"`{config}.yaml`" for config in ARMS[arm])


def table(rows: Sequence[Row], arms: Sequence[str] = tuple(ARMS)) -> str:
    """Return pass@1 of each arm before and after training, turns, rewards and CPU seconds, as Markdown."""
    lines = [
        "| configs | seeds | pass@1 before | after | lowest, highest | gain | turns | reward | CPU seconds |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for arm in arms:
        if not (own := list(by_arm(rows)[arm].values())):
            continue
        before, after = ([row["pass@1"][end][1] for row in own] for end in (0, -1))
        gain = mean_interval([row["pass@1"][-1][1] - row["pass@1"][0][1] for row in own])
        width = f" ± {gain.half_width:.2f}" if len(own) > 1 else ""
        cells = [named(arm), str(len(own)), f"{statistics.fmean(before):.2f}", f"{statistics.fmean(after):.2f}"]
        cells += [f"{min(after):.2f}, {max(after):.2f}", f"{gain.mean:+.2f}{width}"]
        cells += [_ends(own, "turns"), _ends(own, "reward"), f"{statistics.fmean(r['cpu_seconds'] for r in own):.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _ends(rows: Sequence[Row], name: str) -> str:
    """Return the mean of a metric at the beginning and at the end of the runs that have it."""
    pairs = [row[name] for row in rows if row.get(name)]
    return " to ".join(f"{statistics.fmean(ends):.2f}" for ends in zip(*pairs, strict=True))


def verdicts(rows: Sequence[Row], arms: Sequence[str] = tuple(ARMS)) -> str:
    """Return what the seeds say about the final pass@1 of each arm with an overlay, paired by seed."""
    found, lines = by_arm(rows), list[str]()
    for arm in (arm for arm in arms if arm in COMPARISONS):
        final = [{seed: row["pass@1"][-1][1] for seed, row in found[name].items()} for name in (arm, COMPARISONS[arm])]
        if any(not set(SEEDS) <= values.keys() for values in final):
            lines.append(f"- {named(arm)}: no verdict yet, it and {named(COMPARISONS[arm])} need {len(SEEDS)} seeds.")
            continue
        difference = paired_difference(final[0], final[1], 1 - 0.05 / len(COMPARISONS))
        assert difference is not None
        is_clear = abs(difference.mean) > difference.half_width
        side = "above" if difference.mean > 0 else "below"
        verdict = f"**{side}**" if is_clear else "these seeds do not separate it from"
        lines.append(
            f"- {named(arm)}: {difference.mean:+.3f} ± {difference.half_width:.3f} over {difference.count} seeds: "
            f"{verdict} {named(COMPARISONS[arm])}."
        )
    return "\n".join(lines)


def with_tables(page: str, rows: Sequence[Row]) -> str:
    """Return the page with tables and verdicts between their markers."""
    for name, arms in MARKERS.items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        head, _, rest = page.partition(begin)
        text = f"{table(rows, arms)}\n\n{verdicts(rows, arms)}"
        page = f"{head}{begin}\n\n{text}\n\n{end}{rest.partition(end)[2]}"
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arms", nargs="*", choices=[*ARMS, []], help="Arms to run; by default all.")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), help="Seeds to run.")
    parser.add_argument("--workers", type=int, default=1, help="Number of parallel runs, one thread each.")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "environments", help="Folder for the runs.")
    parser.add_argument("--rows", type=Path, default=ROWS, help="File of the rows; by default the stored one.")
    parser.add_argument("--commit", help="Commit to note in the rows, where git does not know it.")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="More settings of lgrpo fit.")
    parser.add_argument("--report", action="store_true", help="Write the page, and train nothing.")
    options = parser.parse_args()
    is_stored = options.rows.resolve() == ROWS
    if options.set and is_stored:
        parser.error("runs with other settings do not belong to the stored rows: name another file with --rows")
    if options.report:
        if not is_stored:
            merge(options.rows, ROWS)
        PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), read(ROWS)), encoding="utf-8")
    else:
        folder, shared = options.folder.resolve(), origin(options.commit)
        launch(options.rows, options.arms or list(ARMS), options.seeds, options.workers, folder, shared, options.set)
    rows = read(ROWS if options.report else options.rows)
    print(f"{table(rows)}\n\n{verdicts(rows)}")


if __name__ == "__main__":
    main()
