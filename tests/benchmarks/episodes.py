"""Seconds and memory of live episodes in worker processes: ``python -m tests.benchmarks.episodes [COUNT …]``."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from lgrpo.environments import GuessNumber, WorkerEpisodes
from tests.processes.alive import running


def seconds(calls: Callable[[], list[Future]]) -> float:
    """Return how long calls take until all have a result."""
    start = time.perf_counter()
    for future in calls():
        future.result()
    return time.perf_counter() - start


def memory_mib(pid: int) -> float:
    """Return the memory of a process and all below it; what they share counts once."""
    pids, new = set(), {pid}
    while new:
        pids |= new
        new = {int(stat[0]) for stat in running() if int(stat[3]) in pids} - pids
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def measure(count: int) -> str:
    """Return a row of the table."""
    game = GuessNumber()
    rows = game.generate_rows(count, seed=0)
    with contextlib.closing(WorkerEpisodes(game)) as episodes:
        episodes.reset(-1, rows[0]).result()
        values = []
        for _ in range(2):
            values.append(seconds(lambda: [episodes.reset(i, row) for i, row in enumerate(rows)]))
            step = seconds(lambda: [episodes.step(i, "5") for i in range(count)])
            memory = memory_mib(episodes._pool.fork_server.process.pid)
            for i in range(count):
                episodes.end(i)
    first, later = values
    return f"| {count} | {first:.2f} | {later:.2f} | {step:.2f} | {memory:.0f} |"


if __name__ == "__main__":
    print(
        "| live episodes | first resets, s | later resets, s | a step of each, s | memory, MiB |\n|---|---|---|---|---|"
    )
    for number in [int(word) for word in sys.argv[1:]] or [64, 256]:
        print(measure(number))
