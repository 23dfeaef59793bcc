"""A reward in processes of its own, which are killed when they take too long or too much."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import final

from lgrpo.rewards.base import AsyncReward, BatchReward, FailedScore, Reward, Score, WrappedReward
from lgrpo.rewards.pool import Limits, ScoringError, WorkerPool
from lgrpo.types import Completion, Prompt


@dataclass(kw_only=True, frozen=True)
class Scoring:
    """How rewards are run: in worker processes, with limits."""

    num_workers: int = 2
    """Processes, of each reward on each rank."""
    timeout: float = 10.0
    """Seconds a completion may take before its worker is killed and replaced."""
    memory_gib: float = 2.0
    """Memory a worker may take beyond what it starts with."""
    output_mib: float = 16.0
    """What a worker may print for a completion, and the size of any file it writes."""
    failure_score: float = 0.0
    """Reward of a completion whose scoring failed."""
    mask_failures: bool = False
    """Take completions whose scoring failed out of the loss. They still count among their siblings."""

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise ValueError(f"scoring.num_workers is {self.num_workers}; at least 1 is needed")
        for name in ("timeout", "memory_gib", "output_mib"):
            if not getattr(self, name) > 0:
                raise ValueError(f"scoring.{name} is {getattr(self, name)}; it must be above 0")
        if not math.isfinite(self.failure_score):
            raise ValueError(f"scoring.failure_score is {self.failure_score}; a reward is a finite number")


@final
class Isolated(WrappedReward):
    """Another reward in worker processes with limits; from any number of threads at once.

    One that hangs, crashes, raises, runs out of memory, floods its output or answers with something that is not a
    finite number costs its own completion only (a ``BatchReward``: its group): that gets ``failure_score`` and is
    counted (``reward/failures``, ``reward/timeouts``, …). A worker is not a sandbox: it can read what you can.
    """

    is_inline = False

    def __init__(self, reward: BatchReward, scoring: Scoring = Scoring()) -> None:  # noqa: B008
        """
        Args:
            reward: What scores; it is pickled once, so it may live in a notebook.
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
        """Ends the processes. The next call starts them again."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def __getstate__(self) -> dict[str, object]:
        """Without its processes."""
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
