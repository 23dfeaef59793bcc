"""``lgrpo sweep``: what the command says and writes."""

from __future__ import annotations

import argparse
import shlex
import warnings
from collections.abc import Callable
from pathlib import Path

from jsonargparse import ArgumentParser

from lgrpo.sweep.check import check_grid
from lgrpo.sweep.grid import SweepError, read_grid
from lgrpo.sweep.launch import launch, launches
from lgrpo.sweep.outcome import Outcome, draw_outcome


def sweep(args: list[str], make_parser: Callable[[], ArgumentParser]) -> None:
    """``lgrpo sweep GRID.yaml``; ``make_parser`` gives what ``lgrpo fit`` can be given."""
    parser = argparse.ArgumentParser(
        prog="lgrpo sweep",
        description="Runs settings × seeds, each as lgrpo fit; a table and a picture with intervals at the end.",
        epilog="What is finished is skipped the next time, what was interrupted goes on from its last checkpoint.",
    )
    parser.add_argument("grid", type=Path, help="YAML file: configs, settings, grid, arms, seeds, metrics, baseline")
    parser.add_argument("--out", type=Path, help="folder of the sweep; by default runs/sweeps/NAME")
    parser.add_argument("--jobs", type=int, default=1, help="how many run at a time")
    parser.add_argument("--dry-run", action="store_true", help="say what would be run, and run nothing")
    own = parser.parse_args(args)
    if own.jobs < 1:
        raise SystemExit(f"lgrpo: --jobs is {own.jobs}; at least 1 runs at a time")
    try:
        grid = read_grid(own.grid)
        check_grid(grid, make_parser())
        out = own.out or Path("runs") / "sweeps" / grid.name
        runs = launches(grid, out)
        states = [run.state for run in runs]
        if own.dry_run:
            for run, state in zip(runs, states, strict=True):
                print(f"{state:<9} lgrpo fit {shlex.join(run.arguments)}")
            return
        failed = launch(runs, own.jobs, lambda line: print(line, flush=True))
        outcome = Outcome.read(grid, runs)
    except SweepError as error:
        raise SystemExit(f"lgrpo: {error}") from error
    except KeyboardInterrupt:
        raise SystemExit(f"lgrpo: stopped; the same command goes on: lgrpo sweep {shlex.join(args)}") from None
    tables = "\n\n".join(outcome.table(metric) for metric in grid.metrics)
    (out / "table.md").write_text(tables + "\n", encoding="utf-8")
    outcome.write_csv(out / "runs.csv")
    try:
        draw_outcome(outcome, out / "picture.png")
    except ImportError as error:
        warnings.warn(str(error), stacklevel=1)
    print(f"\n{tables}\n\nThe sweep is in {out}/: table.md, runs.csv, picture.png, a folder for each run")
    if failed:
        lines = "\n".join(f"  {run.arm.name}, seed {run.seed}: {run.log}" for run in failed)
        raise SystemExit(f"lgrpo: {len(failed)} of {len(runs)} runs failed:\n{lines}")
