"""``lgrpo sweep``: settings × seeds, with a table, a CSV file and a picture of the results."""

from __future__ import annotations

import shlex
import warnings
from pathlib import Path

from lgrpo.checks import check_range
from lgrpo.commands import command_parser
from lgrpo.commands.configs import find_config


def main(args: list[str]) -> None:
    """Run every run of a grid file that is not finished, and write the results of all."""
    if args[:1] == ["--worker"]:  # a process of --share-engines, see lgrpo.sweep.workers
        from lgrpo.commands.shared_runs import serve

        serve(int(args[1]))
        return
    parser = command_parser(
        "sweep",
        "Each run is one lgrpo fit. The results are means and paired differences with confidence intervals. The same "
        "command again skips finished runs and resumes interrupted ones from their last checkpoint.",
        "lgrpo sweep configs/sweeps/period.yaml --jobs 2",
    )
    parser.add_argument(
        "grid",
        metavar="GRID",
        help="File with a grid of configs, settings, arms, seeds, metrics and baseline, or a packaged one's name.",
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="Folder of the sweep. Default: runs/sweeps/NAME.")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="Number of runs at the same time. Default: 1.")
    parser.add_argument(
        "--share-engines",
        action="store_true",
        help="Do the runs one after the other in one process per job, which keeps the engine and compiled code between "
        "runs. The engine is started again only if its settings differ, or after a run that failed.",
    )
    parser.add_argument("--dry-run", action="store_true", help="Print the runs and their states; run nothing.")
    options = parser.parse_args(args)
    check_range("--jobs", options.jobs, at_least=1)

    from lgrpo.commands.settings import settings_parser
    from lgrpo.sweep import Results, SweepError, check_grid, draw_results, list_runs, read_grid, run_all

    try:
        grid = read_grid(find_config(options.grid))
        check_grid(grid, settings_parser())
        out = options.out or Path("runs") / "sweeps" / grid.name
        runs = list_runs(grid, out)
        states = [run.state for run in runs]
        if options.dry_run:
            for run, state in zip(runs, states, strict=True):
                print(f"{state:<9} lgrpo fit {shlex.join(run.arguments)}")
            return
        failed = run_all(runs, options.jobs, lambda line: print(line, flush=True), options.share_engines)
        results = Results.read(grid, runs)
    except SweepError as error:
        raise SystemExit(f"lgrpo: {error}") from error
    except KeyboardInterrupt:
        raise SystemExit(f"lgrpo: stopped; the same command resumes it: lgrpo sweep {shlex.join(args)}") from None
    tables = "\n\n".join(results.table(metric) for metric in grid.metrics)
    (out / "table.md").write_text(tables + "\n", encoding="utf-8")
    results.write_csv(out / "runs.csv")
    try:
        draw_results(results, out / "picture.png")
    except ImportError as error:
        warnings.warn(str(error), stacklevel=1)
    print(f"\n{tables}\n\nThe sweep is in {out}/: table.md, runs.csv, picture.png, and a folder for each run")
    if failed:
        lines = "\n".join(f"  {run.arm.name}, seed {run.seed}: {run.log}" for run in failed)
        raise SystemExit(f"lgrpo: {len(failed)} of {len(runs)} runs failed:\n{lines}")
