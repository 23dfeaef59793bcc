"""Loggers may fail: a full disk, a service that is gone. What is being logged is worth more than the log."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from lightning.pytorch.loggers import Logger

METHODS = ("log_metrics", "log_hyperparams", "save", "finalize", "after_save_checkpoint")


def guard(logger: Logger, on_failure: Callable[[], None]) -> None:
    """From now on a failure of the logger is a warning, the first time, and is counted."""
    if hasattr(logger, "_lgrpo_failed"):
        return
    logger._lgrpo_failed = False  # type: ignore[attr-defined]
    for name in METHODS:
        setattr(logger, name, _guarded(logger, getattr(logger, name), on_failure))


def attempt(logger: Logger, action: Callable[..., Any], on_failure: Callable[[], None]) -> Any:
    """Something a logger does; None where it fails."""
    try:
        return action()
    except Exception as error:
        on_failure()
        if not getattr(logger, "_lgrpo_failed", False):
            logger._lgrpo_failed = True  # type: ignore[attr-defined]
            name, what = type(logger).__name__, f"{type(error).__name__}: {error}"
            warnings.warn(f"{name} failed ({what}); training goes on", stacklevel=3)
        return None


def _guarded(logger: Logger, method: Callable[..., Any], on_failure: Callable[[], None]) -> Callable[..., Any]:
    def guarded(*arguments: Any, **options: Any) -> Any:
        return attempt(logger, lambda: method(*arguments, **options), on_failure)

    return guarded
