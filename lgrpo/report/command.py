"""``lgrpo report``."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from lgrpo.report.page import write_page


def report(args: Sequence[str]) -> None:
    """Writes the page of some runs, once or again and again."""
    given = _parser().parse_args(args)
    if given.completions < 1:
        raise SystemExit(f"lgrpo: --completions is {given.completions}; the table has 1 row or more")
    if given.watch is not None and given.watch < 1:
        raise SystemExit(f"lgrpo: --watch is {given.watch:g}; it is a number of seconds, 1 or more")
    runs: list[Path] = given.runs
    out: Path = given.out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    if out.is_dir():
        raise SystemExit(f"lgrpo: --out {out} is a folder; name a file in it")
    if given.watch is not None:
        _wait(runs, given.watch)
    try:
        records = write_page(runs, out, most_completions=given.completions, refresh=given.watch)
    except OSError as error:
        raise SystemExit(f"lgrpo: the page {out} cannot be written: {error.strerror or error}") from error
    for record in records:
        for note in record.notes:
            print(f"{record.name}: {note}")
    print(f"The page is {out} ({out.stat().st_size / 1e6:.1f} MB): open it in a browser")
    if given.watch is not None:
        print(f"Written again every {given.watch:g} s, and loaded again by itself; Ctrl-C ends it", flush=True)
        _watch(runs, out, given.completions, given.watch)


def _wait(runs: Sequence[Path], seconds: float) -> None:
    """Until every run that has begun has logged something."""
    while early := [run for run in runs if run.is_dir() and not any(run.glob("**/metrics.csv"))]:
        print(f"{early[0]} has no metrics yet: waiting for the first", flush=True)
        time.sleep(seconds)


def _watch(runs: Sequence[Path], out: Path, most_completions: int, seconds: float) -> None:
    try:
        while True:
            time.sleep(seconds)
            write_page(runs, out, most_completions=most_completions, refresh=seconds)
    except KeyboardInterrupt:
        write_page(runs, out, most_completions=most_completions)  # the last one stands still


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lgrpo report",
        description="One HTML file of a run, or of several side by side: curves, time, syncs, completions, settings. "
        "It needs no network, and works while a run goes on.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="the page; by default RUN/report.html, of several runs ./report.html"
    )
    parser.add_argument(
        "--watch", type=float, metavar="SECONDS", help="write it again so often; the open page follows by itself"
    )
    parser.add_argument(
        "--completions",
        type=int,
        default=20_000,
        metavar="N",
        help="at most so many completions on the page, in whole rollouts spread over the run (20000)",
    )
    return parser
