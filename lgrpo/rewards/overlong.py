"""Penalty for completions that are too long."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

from lgrpo.checks import check_range
from lgrpo.rewards.base import BatchReward, NotYet, Score, WrappedReward, checked_rewards, combined
from lgrpo.types import Completion, Prompt


@final
class OverlongPenalty(WrappedReward):
    """Another reward, less a penalty that rises from 0 to ``scale`` over the last ``buffer`` tokens (DAPO)."""

    def __init__(self, reward: BatchReward, max_tokens: int, buffer: int, scale: float = 1.0) -> None:
        """
        Args:
            reward: Reward from which the penalty is subtracted.
            max_tokens: Longest completion, as in ``data.sampling.max_tokens``, where the penalty is ``scale``.
            buffer: Number of tokens before that over which the penalty rises linearly.
            scale: Largest penalty.
        """
        check_range("buffer", buffer, at_least=1, at_most=max_tokens, reason="it counts the last tokens of max_tokens")
        check_range("scale", scale, above=0)
        super().__init__(reward)
        self.max_tokens = max_tokens
        self.buffer = buffer
        self.scale = scale

    def map_leaves(self, change: Callable[[BatchReward], BatchReward]) -> BatchReward:
        return OverlongPenalty(self.reward.map_leaves(change), self.max_tokens, self.buffer, self.scale)

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Score]:
        scores = checked_rewards(self.reward, prompts, completions)
        return [
            score if isinstance(score, NotYet) else combined(score - self.penalty(len(c.token_ids)), [score])
            for score, c in zip(scores, completions, strict=True)
        ]

    def penalty(self, length: int) -> float:
        """Return the penalty of a completion of ``length`` tokens.

        >>> from lgrpo.rewards import ExactMatch
        >>> reward = OverlongPenalty(ExactMatch(), max_tokens=100, buffer=20)
        >>> [reward.penalty(length) for length in (50, 80, 90, 100)]
        [0.0, 0.0, 0.5, 1.0]
        """
        over = length - (self.max_tokens - self.buffer)
        return self.scale * min(max(over / self.buffer, 0.0), 1.0)
