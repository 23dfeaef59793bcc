"""Reward that an environment gave."""

from __future__ import annotations

from typing import cast, final

from lgrpo.rewards.base import FailedScore, Failure, Reward, Score
from lgrpo.types import Completion, Prompt


@final
class EnvironmentReward(Reward):
    """The sum of the rewards that an environment gave to the turns of an episode."""

    is_inline = True

    def __init__(self, failure_score: float = 0.0) -> None:
        """
        Args:
            failure_score: Reward of an episode that a failure of the environment ended.
        """
        self.failure_score = failure_score

    @property
    def turn_weight(self) -> float:
        return 1.0

    def score(self, prompt: Prompt, completion: Completion) -> Score:
        if completion.failure is not None:
            kind, reason = completion.failure
            score = FailedScore(self.failure_score, cast(Failure, kind), reason)
            score.is_reported = True
            return score
        if completion.turn_rewards is None:
            raise ValueError(
                "EnvironmentReward scores episodes, and this completion is none: sample with data.engine: "
                "lgrpo.engines.EnvironmentEngine"
            )
        return sum(completion.turn_rewards)
