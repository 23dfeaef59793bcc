"""The league: every method of ``configs/algorithms`` at four lags, with its best learning rate, on one task.

    python -m tests.benchmarks.league --minutes 60     # continues where the last command stopped
    python -m tests.benchmarks.league --subset         # four methods at one lag, to reproduce their rows
    python -m tests.benchmarks.league --report         # page and heat map of the rows so far

For each method and lag, three learning rates are run with three seeds each (stage ``select``), and a lower one if the
lowest of them is the best. The rate with the best mean pass@1 on the *validation* problems is then run with ten other
seeds (stage ``test``), and pass@1 on the *test* problems is reported. Every run of a seed begins with the same model,
which was trained on solutions for a while.

Each run appends a row to ``tests/benchmarks/results/league.jsonl``; runs that failed are repeated by the next command.
Lags come one after the other, methods in blocks of two, GRPO first, and a block is finished before the next one.
The page is ``tutorials/pages/league.md``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

from tests.benchmarks.league_arm import ROOT, Job, attempt, methods, origin

RESULTS = Path(__file__).parent / "results"
ROWS = RESULTS / "league.jsonl"
CACHE = ROOT / "runs" / "league"
SUBSET_ROWS = CACHE / "subset.jsonl"
LAGS = ("64", "8", "1", "offline")
"""Lags in the order of the runs."""
RATES = (1e-4, 3e-4, 1e-3)
LOWER_RATE = 3e-5
"""Learning rate that is also run where the lowest of ``RATES`` is the best of them."""
SELECT_SEEDS, TEST_SEEDS = range(3), range(100, 110)
BASELINE = "grpo"
FIRST = (BASELINE, "topr", "off_policy_grpo", "reinforce", "decoupled_ppo", "vespo", "sapo", "dppo_tv")
"""Methods in the order of the runs; the others follow by name."""
BLOCK = 2
SUBSET = FIRST[:4]
RUNS_PER_CELL = len(RATES) * len(SELECT_SEEDS) + len(TEST_SEEDS)

Row = dict[str, Any]


def read(path: Path) -> list[Row]:
    """Return the newest row of every job."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return list({job_of(row): row for row in map(json.loads, lines)}.values())


def job_of(row: Row) -> Job:
    return Job(stage=row["stage"], method=row["method"], lag=row["lag"], lr=row["lr"], seed=row["seed"])


def in_order(names: Iterable[str]) -> list[str]:
    """Return methods in the order of their runs."""
    return sorted(names, key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), name))


def rates_to_try(rows: Iterable[Row], method: str, lag: str) -> tuple[float, ...]:
    """Return the learning rates to select from, as far as they are known from rows."""
    return (LOWER_RATE, *RATES) if _best_of(RATES, rows, method, lag) == min(RATES) else RATES


def best_rate(rows: Sequence[Row], method: str, lag: str) -> float | None:
    """Return the learning rate with the best mean validation pass@1; None until all runs that select it have a row.

    A rate with a failed run is not eligible.
    """
    return _best_of(rates_to_try(rows, method, lag), rows, method, lag)


def _best_of(rates: Iterable[float], rows: Iterable[Row], method: str, lag: str) -> float | None:
    own = [row for row in rows if (row["stage"], row["method"], row["lag"]) == ("select", method, lag)]
    means: dict[float, float] = {}
    for rate in rates:
        runs = [row for row in own if row["lr"] == rate and row["seed"] in SELECT_SEEDS]
        if len(runs) < len(SELECT_SEEDS):
            return None
        if not any("error" in row for row in runs):
            means[rate] = statistics.fmean(row["validation"] for row in runs)
    return max(means, key=means.__getitem__, default=None)


def planned(rows: Sequence[Row], names: Sequence[str], lags: Sequence[str]) -> Iterator[Job]:
    """Yield all runs in order, those of stage ``test`` only where the learning rate is known."""
    of_cell: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        of_cell[row["method"], row["lag"]].append(row)
    for lag in lags:
        for start in range(0, len(names), BLOCK):
            block = names[start : start + BLOCK]
            for seed in SELECT_SEEDS:
                for rate in RATES:
                    for name in block:
                        yield Job(stage="select", method=name, lag=lag, lr=rate, seed=seed)
            for name in block:
                if LOWER_RATE in rates_to_try(of_cell[name, lag], name, lag):
                    for seed in SELECT_SEEDS:
                        yield Job(stage="select", method=name, lag=lag, lr=LOWER_RATE, seed=seed)
            selected = {name: best_rate(of_cell[name, lag], name, lag) for name in block}
            for seed in TEST_SEEDS:
                for name in block:
                    if (best := selected[name]) is not None:
                        yield Job(stage="test", method=name, lag=lag, lr=best, seed=seed)


def check_start(row: Row, rows: Iterable[Row]) -> None:
    """Raise an error if a run began with another model than the stored runs of its seed, as on another processor."""
    for other in rows:
        if other["seed"] == row["seed"] and "error" not in {**row, **other} and other["start"] != row["start"]:
            raise RuntimeError(
                f"the start model of seed {row['seed']} is {row['start']} here, and {other['start']} in the stored "
                f"rows: copy {CACHE.relative_to(ROOT)} from the machine that made these, or start with new rows"
            )


def launch(
    path: Path,
    names: Sequence[str],
    lags: Sequence[str],
    workers: int,
    minutes: float | None,
    commit: str | None = None,
) -> None:
    """Run the missing jobs, several at a time, and append a row for each; start none after so many minutes."""
    rows, shared = read(path), origin() | ({} if commit is None else {"commit": commit})
    started = {job_of(row) for row in rows if "error" not in row}
    deadline = float("inf") if minutes is None else time.monotonic() + 60 * minutes
    running: set[Future[Row]] = set()
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    path.parent.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        while True:
            while len(running) < workers and time.monotonic() < deadline:
                job = next((job for job in planned(rows, names, lags) if job not in started), None)
                if job is None:
                    break
                started.add(job)
                running.add(pool.submit(attempt, job, CACHE, shared))
            if not running:
                return
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            for row in (future.result() for future in ended):
                check_start(row, rows)
                rows = [other for other in rows if job_of(other) != job_of(row)] + [row]
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
                score = row.get("error") or f"validation {row['validation']:.3f}, {row['seconds']:.0f} s"
                print(f"{len(rows)}: {' '.join(map(str, list(row.values())[:5]))}: {score}", flush=True)


def main() -> None:
    from tests.benchmarks import league_report

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=methods(), help="methods to run; by default all", metavar="M")
    parser.add_argument("--lags", nargs="+", choices=LAGS, default=LAGS, help="lags to run, in this order")
    parser.add_argument("--minutes", type=float, help="start no run after this time; by default until all are done")
    parser.add_argument("--workers", type=int, default=1, help="parallel runs, one thread each")
    parser.add_argument(
        "--subset",
        action="store_true",
        help=f"run {', '.join(SUBSET)} at lag {LAGS[0]} only, into {SUBSET_ROWS.relative_to(ROOT)}, and compare",
    )
    parser.add_argument("--rows", type=Path, default=ROWS, help="file to append rows to, and to read")
    parser.add_argument("--commit", help="commit to note in the rows, where git does not know it")
    parser.add_argument("--report", action="store_true", help="write the report without running anything")
    options = parser.parse_args()
    path = SUBSET_ROWS if options.subset else options.rows
    names = list(SUBSET) if options.subset else in_order(options.methods or methods())
    if not options.report:
        lags = LAGS[:1] if options.subset else options.lags
        launch(path, names, lags, options.workers, options.minutes, options.commit)
    if options.subset:
        print(league_report.comparison(read(path), read(ROWS)))
    else:
        league_report.write(read(path))
        print(league_report.table(read(path)))


if __name__ == "__main__":
    main()
