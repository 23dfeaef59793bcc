"""Scoring of groups while others are still being sampled."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import get_args

from lgrpo.rewards import BatchReward, FailedScore, Failure, Isolated, Score, Scoring, checked_rewards
from lgrpo.types import Completion, Prompt

_MAX_CONCURRENT_GROUPS = 32


class Scorer:
    """A task's reward as a run uses it: parts that may do harm run in workers with limits.

    For each generation, pass ``GroupScores`` to the engine as ``on_group``, then take its ``result()``. ``close`` ends
    the threads and workers.
    """

    def __init__(self, reward: BatchReward, scoring: Scoring | None) -> None:
        """
        Args:
            reward: Reward of the task.
            scoring: Workers and limits; None scores in this process, one group after another.
        """
        self.reward = reward
        if scoring is not None:
            self.reward = reward.map_leaves(lambda leaf: leaf if leaf.is_inline else Isolated(leaf, scoring))
        num_threads = 1 if scoring is None or self.reward.is_inline else _MAX_CONCURRENT_GROUPS
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="score")
        self._has_succeeded = False
        self._has_warned = False

    def submit(self, prompt: Prompt, completions: Sequence[Completion]) -> Future[list[Score]]:
        """Score a group in a thread. Completions with a recorded score keep it."""
        return self._threads.submit(self._scores, prompt, completions)

    def _scores(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        recorded = [completion.reward for completion in completions]
        if all(reward is not None for reward in recorded):
            return [reward for reward in recorded if reward is not None]
        read = [c if c.kept is None else replace(c, kept=None) for c in completions]  # workers need not receive it
        scores = checked_rewards(self.reward, [prompt] * len(completions), read)  # a reward may compare siblings
        return [score if kept is None else kept for score, kept in zip(scores, recorded, strict=True)]

    def close(self) -> None:
        """End the threads and the reward's workers."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.reward.close()

    def failures(self, groups: Sequence[Sequence[Score]]) -> dict[str, float]:
        """Return metrics that count failed scores by kind; none if the reward cannot fail."""
        if not self.reward.can_fail:
            return {}
        kinds = Counter(score.kind for group in groups for score in group if isinstance(score, FailedScore))
        counts = {f"reward/{kind}": float(kinds[kind]) for kind in get_args(Failure)}
        return {"reward/failures": float(kinds.total())} | counts

    def check_failures(self, groups: Sequence[Sequence[Score]]) -> None:
        """Warn of the first failure; raise an error if no completion has ever been scored."""
        scores = [score for group in groups for score in group]
        failed = [score for score in scores if isinstance(score, FailedScore) and not score.is_reported]
        if failed and len(failed) == len(scores) and not self._has_succeeded:
            raise RuntimeError(f"the reward failed on each of the first {len(failed)} completions: {failed[0].why}")
        self._has_succeeded |= len(failed) < len(scores)
        if failed and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"the reward failed on {len(failed)} of {len(scores)} completions; the first failure: {failed[0].why}. "
                "From now on reward/failures counts them",
                stacklevel=2,
            )


class GroupScores:
    """Scores of one generation; the engine calls it with each group that is complete."""

    def __init__(self, scorer: Scorer, prompts: Sequence[Prompt]) -> None:
        self._scorer = scorer
        self._prompts = prompts
        self._futures: dict[int, Future[list[Score]]] = {}

    def __call__(self, index: int, completions: list[Completion]) -> None:
        self._futures[index] = self._scorer.submit(self._prompts[index], completions)

    def result(self, indices: Sequence[int] | None = None) -> list[list[Score]]:
        """Return the scores of some groups, by the indices of their prompts; by default of all, in order."""
        groups = [self._futures[index].result() for index in indices or range(len(self._prompts))]
        self._scorer.check_failures(groups)
        return groups
