"""Failures of engines: the error classes, and the time limits and failure budget of engines with processes."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from lgrpo.checks import check_count, check_range

RESUME_ADVICE = "resume from the last checkpoint (lgrpo fit … --ckpt_path last)"

_T = TypeVar("_T")
_lock = threading.Lock()
"""Lock of all budgets; not an attribute, because engines are pickled."""


class EngineError(RuntimeError):
    """An engine cannot start, sync or generate."""


class NoWeightsError(RuntimeError):
    """An engine was asked for completions before it was given a policy."""

    def __init__(self) -> None:
        super().__init__(
            "the engine holds no weights, so there is no behaviour policy to sample from: give the Trainer a "
            "WeightSync callback (lgrpo.WeightSync(period=v)), which syncs the policy before the first rollout"
        )


class EngineFailure(EngineError):
    """A running engine failed for a reason other than the request: after a restart it may succeed."""


@dataclass(kw_only=True, slots=True)
class Faults:
    """Failures of an engine since it was built. Equality ignores ``recovery_seconds``."""

    num_failures: int = 0
    num_restarts: int = 0
    """Processes and servers that were started again."""
    recovery_seconds: float = field(default=0.0, compare=False)
    """Total time spent on restarts."""

    def __sub__(self, other: Faults) -> Faults:
        return Faults(
            num_failures=self.num_failures - other.num_failures,
            num_restarts=self.num_restarts - other.num_restarts,
            recovery_seconds=self.recovery_seconds - other.recovery_seconds,
        )


class FailureBudget:
    """Number of failures that one generation or one sync may recover from. Safe to use from several threads.

    An engine calls ``reset`` at the start of each generation and sync, ``count_failure`` before each restart, and
    ``count_restarts`` after it. ``faults`` holds the totals of the engine's lifetime.
    """

    def __init__(self, max_failures: int) -> None:
        """
        Args:
            max_failures: Failures to recover from; the next one raises an error.
        """
        check_count("max_failures", max_failures, at_least=0, reason="0 stops at the first failure")
        self.max_failures = max_failures
        self.faults = Faults()
        self._count = 0

    def reset(self) -> None:
        """Start counting from 0."""
        self._count = 0

    def count_failure(self, failure: EngineFailure, is_consequence: bool = False) -> None:
        """Warn about a failure, or raise an ``EngineError`` with advice if it exceeds the budget.

        Args:
            failure: Failure to recover from.
            is_consequence: Whether it follows from a failure that was counted already, so that it is not counted again.
        """
        with _lock:
            if not is_consequence:
                self.faults.num_failures += 1
                self._count += 1
            count = min(self._count, self.max_failures + 1)  # other threads may fail after the one that is reported
        if count <= self.max_failures:
            warnings.warn(f"recovering from failure {count} of at most {self.max_failures}: {failure}", stacklevel=3)
            return
        advice = "Fix the cause, then"
        if "memory" in str(failure).lower():
            advice = "It ran out of memory: lower max_num_seqs, or kv_cache_gib and gpu_memory_utilization, then"
        times = "once" if count == 1 else f"{count} times"
        raise EngineError(
            f"vLLM failed {times} in one generation or sync (max_failures is {self.max_failures}). Last failure: "
            f"{failure}\n{advice} {RESUME_ADVICE}"
        ) from failure

    def count_restarts(self, number: int = 1) -> None:
        """Add restarts to the totals."""
        self.add(Faults(num_restarts=number))

    def add(self, faults: Faults) -> None:
        """Add faults to the totals, such as those of an engine in another process, which has a budget there."""
        with _lock:
            self.faults.num_failures += faults.num_failures
            self.faults.num_restarts += faults.num_restarts
            self.faults.recovery_seconds += faults.recovery_seconds

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the time spent inside to ``faults.recovery_seconds``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(Faults(recovery_seconds=time.perf_counter() - start))


def for_each_healthy(items: Iterable[_T], failures: dict[_T, EngineFailure], action: Callable[[_T], Any]) -> None:
    """Call ``action`` with every item that is not in ``failures``, and add the items for which it fails."""
    for item in items:
        if item not in failures:
            try:
                action(item)
            except EngineFailure as failure:
                failures[item] = failure


@dataclass(kw_only=True, frozen=True)
class Timeouts:
    """Time limits of an engine, in seconds. Each engine uses those that apply to it."""

    start: float = 600.0
    """Seconds until a process or server that was started must be ready."""
    sync: float = 300.0
    """Seconds that each step of a sync may take."""
    generate: float = 1800.0
    """Seconds that a generation may take, counted from the last recovery."""
    hang: float = 60.0
    """Seconds without an answer after which a server that generates has failed."""
    reconnect: float = 120.0
    """Seconds to wait until a failed server of ``urls`` answers again; then the run continues without it, and the next
    sync looks for it."""

    def __post_init__(self) -> None:
        for limit in fields(self):
            check_range(f"timeouts.{limit.name}", getattr(self, limit.name), above=0)
