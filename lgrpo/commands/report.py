"""``lgrpo report``: an HTML page of one run or several runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

from lgrpo.checks import check_range
from lgrpo.commands import command_parser

WATCH_SECONDS = 10.0
"""Interval of ``--watch`` if none is given."""


def main(args: list[str]) -> None:
    """Write the page; with ``--watch``, write it again until Ctrl-C."""
    parser = command_parser(
        "report",
        "The page shows curves, times, syncs, completions and settings, several runs side by side. It is one file, "
        "needs no network, and can be written while a run is training.",
        "lgrpo report --watch runs/demo",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="Folder of a run.")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="HTML file. Default: RUN/report.html, or ./report.html for several."
    )
    parser.add_argument(
        "--watch",
        type=float,
        nargs="?",
        const=WATCH_SECONDS,
        metavar="SECONDS",
        help=f"Write the page again and again, every {WATCH_SECONDS:g} seconds by default. Without it: once.",
    )
    parser.add_argument(
        "--completions",
        type=int,
        default=20_000,
        metavar="N",
        help="Maximum number of completions on the page, in whole rollouts evenly spaced over the run. Default: 20000.",
    )
    options = parser.parse_args(_with_interval(args))
    check_range("--completions", options.completions, at_least=1)
    check_range("--watch", options.watch, at_least=1, reason="it is an interval in seconds")
    runs: list[Path] = options.runs
    out: Path = options.out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    if out.is_dir():
        raise SystemExit(f"lgrpo: --out {out} is a folder: name a file in it")

    from lgrpo.report.page import write_page

    write = partial(write_page, runs, out, max_completions=options.completions)
    if options.watch is not None:
        _wait_for_metrics(runs, options.watch)
    try:
        records = write(refresh=options.watch)
    except OSError as error:
        raise SystemExit(f"lgrpo: the page {out} cannot be written: {error.strerror or error}") from error
    for record in records:
        for note in record.notes:
            print(f"{record.name}: {note}")
    print(f"The page is {out} ({out.stat().st_size / 1e6:.1f} MB): open it in a browser")
    if options.watch is not None:
        print(f"It is written again every {options.watch:g} s, and reloads itself; press Ctrl-C to stop", flush=True)
        try:
            while True:
                time.sleep(options.watch)
                write(refresh=options.watch)
        except KeyboardInterrupt:
            write()  # the last page does not reload itself


def _with_interval(args: list[str]) -> list[str]:
    """Return the arguments with an interval after ``--watch`` if something else follows it, such as a run."""
    for index, (option, value) in enumerate(pairwise(args), start=1):
        if option == "--watch" and not _is_number(value):
            return [*args[:index], f"{WATCH_SECONDS:g}", *args[index:]]
    return args


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _wait_for_metrics(runs: Sequence[Path], seconds: float) -> None:
    """Wait until every run whose folder exists has logged metrics."""
    while early := [run for run in runs if run.is_dir() and not any(run.glob("**/metrics.csv"))]:
        print(f"{early[0]} has no metrics yet: waiting for the first", flush=True)
        time.sleep(seconds)
