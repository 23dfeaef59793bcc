"""``lgrpo validate`` and ``test``: every checkpoint of a run, and the table of metrics."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L

from lgrpo.report import find_checkpoints, headlines, write_summary
from lgrpo.report.evaluations import with_error


def add_config_of_run(args: list[str]) -> list[str]:
    """Return the arguments with the config of RUN added if they have ``--checkpoints RUN`` and no ``--config``."""
    options = [arg.partition("=")[0] for arg in args]
    if args[:1] not in (["validate"], ["test"]) or "--checkpoints" not in options:
        return args
    index = options.index("--checkpoints")
    run = Path(args[index].partition("=")[2] or "".join(args[index + 1 : index + 2]))
    if not run.is_dir():
        raise SystemExit(f"lgrpo: there is no folder {run}: --checkpoints takes the folder of a run")
    if "--config" in options:
        return args
    config = next((folder / "config.yaml" for folder in (run, run.parent) if (folder / "config.yaml").exists()), None)
    if config is None:
        raise SystemExit(f"lgrpo: there is no config.yaml in {run}: give the config of the run with --config")
    replaced = ["--ckpt_path=null", *([] if "--run" in options else [f"--run={config.parent}"])]
    return [args[0], f"--config={config}", *replaced, *args[1:]]


def refuse_log_option(args: list[str]) -> None:
    """Exit if ``--log`` is given to ``validate`` or ``test``; a config may have it, for ``fit``."""
    if args[:1] in (["validate"], ["test"]) and "--log" in [arg.partition("=")[0] for arg in args]:
        raise SystemExit(
            f"lgrpo: --log is an option of lgrpo fit; lgrpo {args[0]} prints its metrics, and logs them if you name a "
            "logger: --trainer.logger=lightning.pytorch.loggers.CSVLogger --trainer.logger.save_dir=FOLDER"
        )


def evaluate_checkpoints(trainer: L.Trainer, evaluate: Callable[..., Any], run: Path, file_name: str) -> None:
    """Evaluate every checkpoint of a run; print the metrics and write them to ``run/evaluations/file_name``.

    ``evaluate`` is ``trainer.validate`` or ``trainer.test`` with the model and the data bound.
    """
    table: dict[int, dict[str, float]] = {}
    for step, path in find_checkpoints(run).items():
        evaluate(ckpt_path=str(path), weights_only=True)
        table[step] = logged_metrics(trainer)
        if trainer.is_global_zero:
            print(f"step {step}: " + ", ".join(headlines(table[step])), flush=True)
    if trainer.is_global_zero:
        print(write_summary(table, run / "evaluations" / file_name))


def logged_metrics(trainer: L.Trainer) -> dict[str, float]:
    """Return the metrics of the last evaluation by name."""
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def print_metrics(metrics: dict[str, float]) -> None:
    """Print one metric per line, with its standard error.

    >>> print_metrics({"test/pass@1": 0.5, "test/pass@1_stderr": 0.1, "test/length": 7.0})
    test/pass@1         0.5000 ± 0.1000
    test/length         7.0000
    """
    width = max(map(len, metrics), default=0) + 2
    for name in metrics:
        if not name.endswith("_stderr"):
            print(f"{name:<{width}}{with_error(metrics, name)}")
