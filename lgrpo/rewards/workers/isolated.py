"""Reward in worker processes, which are killed when they exceed a limit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import final

from lgrpo.rewards.base import AsyncReward, BatchReward, FailedScore, Reward, Score, WrappedReward
from lgrpo.rewards.workers.fork_server import Scoring
from lgrpo.rewards.workers.pool import ScoringError, WorkerPool
from lgrpo.types import Completion, Prompt


@final
class Isolated(WrappedReward):
    """Runs another reward in worker processes with limits. Thread-safe.

    If scoring hangs, crashes, raises, runs out of memory, prints too much or returns something that is not a finite
    number, only that completion is affected (with a ``BatchReward``: its group). It gets ``failure_score`` and is
    counted (``reward/failures``, ``reward/timeouts``, …). A worker is not a sandbox: it has your access rights.

    The first call starts the processes. ``close`` ends them; the next call starts them again.
    """

    is_inline = False
    can_fail = True

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
        scores = [score for future in futures for score in self._scores(future, size)]
        self.reward.observe(scores)
        return scores

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
        with self._lock:
            if self._pool is None:
                count = self.scoring.num_workers
                name = type(self.reward).__name__
                from lightning.pytorch.utilities import rank_zero_info  # here, because workers import this module

                rank_zero_info(f"Starting {count} reward worker{'s' * (count > 1)} for {name}.")
                self._pool = WorkerPool(self.reward, self.scoring)
            return self._pool

    def _scores(self, future: Future[list[Score]], size: int) -> list[Score]:
        try:
            return future.result()
        except ScoringError as error:
            return [FailedScore(self.scoring.failure_score, error.kind, str(error), error.notes)] * size
