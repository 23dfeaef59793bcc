"""Logging of metrics, and loggers whose failures do not end the run."""

from __future__ import annotations

import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import lightning as L
import torch
from lightning.pytorch.loggers import Logger
from lightning.pytorch.trainer.states import TrainerFn

METHODS = ("log_metrics", "log_hyperparams", "save", "finalize", "after_save_checkpoint")
"""Methods of a logger that may fail."""
_has_failed: WeakKeyDictionary[Logger, bool] = WeakKeyDictionary()  # keys: loggers whose failures are tolerated


def log_metrics(trainer: L.Trainer, metrics: dict[str, float], step: int) -> None:
    """Send metrics to the loggers and to callbacks that monitor one. They must be reduced over ranks already."""
    trainer.callback_metrics.update({name: torch.tensor(value) for name, value in metrics.items()})
    write_metrics(trainer, metrics, step)


def log_evaluation(module: L.LightningModule, prefix: str, metrics: dict[str, float], seconds: float) -> None:
    """Log the metrics of a validation or a test, reduced over ranks already, as ``prefix/name``, and its duration.

    During ``fit`` they are written directly, because Lightning drops those of the sanity check, which are the run's
    starting point.
    """
    named = {f"{prefix}/{name}": value for name, value in metrics.items()}
    is_fitting = module.trainer.state.fn == TrainerFn.FITTING
    if is_fitting:
        write_metrics(module.trainer, named | {"time/validate": seconds}, module.global_step)
    if not module.trainer.sanity_checking:
        module.log_dict(named, logger=not is_fitting)


class StepLog:
    """Metrics of one optimizer step, logged as one row.

    ``add`` may be called at any time, ``start`` at the step's first micro-batch, ``write`` after the optimizer step.
    """

    def __init__(self) -> None:
        self._added: defaultdict[str, float] = defaultdict(float)
        self._rollout: dict[str, float] = {}
        self._started = 0.0

    def add(self, name: str, value: float) -> None:
        """Add a value to a metric of the next row; values of one name are summed."""
        self._added[name] += value

    def start(self, rollout_metrics: dict[str, float]) -> None:
        """Start the clock of ``time/update``; the row will include the metrics of the rollout."""
        self._rollout, self._started = rollout_metrics, time.perf_counter()

    def write(self, trainer: L.Trainer, metrics: dict[str, float]) -> None:
        """Log row s, of the step from s to s + 1.

        It is written before a checkpoint of step s + 1, so a crash in between loses no row. ``LightningModule.log``
        would take a tenth of a small model's step, because it processes each metric separately.
        """
        row = metrics | {"time/update": time.perf_counter() - self._started} | self._rollout | self._added
        self._added.clear()  # failures of the loggers below count in the next row
        trainer.callback_metrics.update({name: torch.tensor(value) for name, value in row.items()})
        if (trainer.global_step + 1) % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            write_metrics(trainer, row, trainer.global_step)


def write_metrics(trainer: L.Trainer, metrics: dict[str, float], step: int) -> None:
    """Write a row to every logger."""
    for logger in trainer.loggers:
        logger.log_metrics(metrics, step=step)
        logger.save()


def tolerate_failures(loggers: Iterable[Logger], on_failure: Callable[[], None]) -> None:
    """Turn errors of loggers into a warning, at the first of each, and a call of ``on_failure``, at every one."""
    for logger in loggers:
        if logger not in _has_failed:
            _has_failed[logger] = False
            for name in METHODS:
                setattr(logger, name, partial(attempt, logger, on_failure, getattr(logger, name)))


def attempt(
    logger: Logger, on_failure: Callable[[], None], action: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Return the result of an action of a logger, or None if it fails."""
    try:
        return action(*args, **kwargs)
    except Exception as error:
        on_failure()
        if not _has_failed.get(logger, False):
            _has_failed[logger] = True
            reason = f"{type(error).__name__}: {error}"
            warnings.warn(f"{type(logger).__name__} failed ({reason}); training continues", stacklevel=2)
        return None
