"""Groups scored while others are still being sampled."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import get_args

from lgrpo.rewards import BatchReward, FailedScore, Failure, Isolated, Score, Scoring, checked_rewards
from lgrpo.types import Completion, Prompt

_GROUPS_AT_ONCE = 32


class Scorer:
    """A task's reward as a run uses it: in workers with limits, where it is not known to be harmless."""

    def __init__(self, reward: BatchReward, scoring: Scoring | None) -> None:
        """
        Args:
            reward: Of the task.
            scoring: Workers and limits; None: in this process, one group after another.
        """
        self.reward = reward
        if scoring is not None:
            self.reward = reward.map_leaves(lambda leaf: leaf if leaf.is_inline else Isolated(leaf, scoring))
        at_once = 1 if scoring is None or self.reward.is_inline else _GROUPS_AT_ONCE
        self._threads = ThreadPoolExecutor(at_once, thread_name_prefix="score")
        self._has_worked = False
        self._has_warned = False

    def follow(self, prompts: Sequence[Prompt]) -> GroupScores:
        """Hears of the completions of some prompts, and scores them."""
        return GroupScores(self, prompts)

    def submit(self, prompt: Prompt, completions: Sequence[Completion]) -> Future[list[Score]]:
        """Has a group scored. A completion that was recorded with a score keeps it."""
        return self._threads.submit(self._scores, prompt, completions)

    def _scores(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        recorded = [completion.reward for completion in completions]
        if all(reward is not None for reward in recorded):
            return [reward for reward in recorded if reward is not None]
        scores = checked_rewards(self.reward, [prompt] * len(completions), completions)  # siblings may be compared
        return [score if kept is None else kept for score, kept in zip(scores, recorded, strict=True)]

    def close(self) -> None:
        """Ends what scores."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.reward.close()

    def failures(self, groups: Sequence[Sequence[Score]]) -> dict[str, float]:
        """How many completions could not be scored, and how that came; nothing where no worker scores."""
        if self.reward.is_inline:
            return {}
        kinds = Counter(score.kind for group in groups for score in group if isinstance(score, FailedScore))
        counts = {f"reward/{kind}": float(kinds[kind]) for kind in get_args(Failure)}
        return {"reward/failures": float(kinds.total())} | counts

    def look_at(self, groups: Sequence[Sequence[Score]]) -> None:
        """Warns of the first failure; where nothing has ever been scored, failing is all the reward can do."""
        scores = [score for group in groups for score in group]
        failed = [score for score in scores if isinstance(score, FailedScore)]
        if failed and len(failed) == len(scores) and not self._has_worked:
            raise RuntimeError(f"the reward failed on each of the first {len(failed)} completions: {failed[0].why}")
        self._has_worked |= len(failed) < len(scores)
        if failed and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"the reward failed on {len(failed)} of {len(scores)} completions; the first time: {failed[0].why}. "
                "From now on reward/failures counts them",
                stacklevel=2,
            )


class GroupScores:
    """The scores of one generation. It is what an engine calls when a group is complete."""

    def __init__(self, scorer: Scorer, prompts: Sequence[Prompt]) -> None:
        self._scorer = scorer
        self._prompts = prompts
        self._futures: dict[int, Future[list[Score]]] = {}

    def __call__(self, place: int, completions: list[Completion]) -> None:
        self._futures[place] = self._scorer.submit(self._prompts[place], completions)

    def result(self) -> list[list[Score]]:
        """The scores of all groups, in the order of their prompts."""
        groups = [self._futures[place].result() for place in range(len(self._prompts))]
        self._scorer.look_at(groups)
        return groups
