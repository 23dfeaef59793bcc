"""Reward in worker processes, which are killed when they exceed a limit."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import final

from lgrpo.checks import check_range
from lgrpo.rewards.base import AsyncReward, BatchReward, FailedScore, Reward, Score, WrappedReward
from lgrpo.rewards.workers.fork_server import Limits
from lgrpo.rewards.workers.pool import ScoringError, WorkerPool
from lgrpo.types import Completion, Prompt


@dataclass(kw_only=True, frozen=True)
class Scoring:
    """Worker processes that run a reward, and their limits."""

    num_workers: int = 2
    """Number of processes for each reward on each rank."""
    timeout: float = 10.0
    """Seconds a completion may take before its worker is killed and replaced."""
    memory_gib: float = 2.0
    """Memory a worker may take in addition to what it starts with."""
    output_mib: float = 16.0
    """Size of the output of a worker for a completion, and of any file it writes."""
    failure_score: float = 0.0
    """Reward of a completion whose scoring failed."""
    mask_failures: bool = False
    """Take completions whose scoring failed out of the loss. They still count among their siblings."""

    def __post_init__(self) -> None:
        check_range("scoring.num_workers", self.num_workers, at_least=1)
        check_range("scoring.timeout", self.timeout, above=0)
        check_range("scoring.memory_gib", self.memory_gib, above=0)
        check_range("scoring.output_mib", self.output_mib, above=0)
        if not math.isfinite(self.failure_score):
            raise ValueError(f"scoring.failure_score is {self.failure_score}; it must be a finite number")


@final
class Isolated(WrappedReward):
    """Runs another reward in worker processes with limits. Thread-safe.

    If scoring hangs, crashes, raises, runs out of memory, prints too much or returns something that is not a finite
    number, only that completion is affected (with a ``BatchReward``: its group). It gets ``failure_score`` and is
    counted (``reward/failures``, ``reward/timeouts``, …). A worker is not a sandbox: it has your access rights.

    The first call starts the processes. ``close`` ends them; the next call starts them again.
    """

    is_inline = False

    def __init__(self, reward: BatchReward, scoring: Scoring = Scoring()) -> None:  # noqa: B008
        """
        Args:
            reward: Reward to run. It is pickled by value, so it may be defined in a notebook.
            scoring: Workers and limits.
        """
        super().__init__(reward)
        self.scoring = scoring
        self._pool: WorkerPool | None = None
        self._lock = threading.Lock()

    def map_leaves(self, change: Callable[[BatchReward], BatchReward]) -> BatchReward:
        return self

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Score]:
        pool = self._open()
        size = 1 if isinstance(self.reward, Reward | AsyncReward) else max(1, len(completions))
        futures = [
            pool.submit(prompts[i : i + size], completions[i : i + size]) for i in range(0, len(completions), size)
        ]
        return [score for future in futures for score in self._scores(future, size)]

    def close(self) -> None:
        """End the processes. The next call starts them again."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def __getstate__(self) -> dict[str, object]:
        """Return the state without the processes."""
        return {"reward": self.reward, "scoring": self.scoring}

    def __setstate__(self, state: dict[str, object]) -> None:
        Isolated.__init__(self, **state)  # type: ignore[arg-type]

    def _open(self) -> WorkerPool:
        limits = Limits(
            timeout=self.scoring.timeout,
            memory=int(self.scoring.memory_gib * 2**30),
            output=int(self.scoring.output_mib * 2**20),
        )
        with self._lock:
            if self._pool is None:
                self._pool = WorkerPool(self.reward, self.scoring.num_workers, limits)
            return self._pool

    def _scores(self, future: Future[list[Score]], size: int) -> list[Score]:
        try:
            return future.result()
        except ScoringError as error:
            return [FailedScore(self.scoring.failure_score, error.kind, str(error))] * size
