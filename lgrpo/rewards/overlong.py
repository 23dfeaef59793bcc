"""A reward that grows less as an answer grows too long."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

from lgrpo.rewards.base import BatchReward, NotYet, Score, WrappedReward, checked_rewards, combined
from lgrpo.types import Completion, Prompt


@final
class OverlongPenalty(WrappedReward):
    """Another reward, less a penalty that rises from 0 to ``scale`` over the last ``buffer`` tokens (DAPO)."""

    def __init__(self, reward: BatchReward, max_tokens: int, buffer: int, scale: float = 1.0) -> None:
        """
        Args:
            reward: Of the answer itself.
            max_tokens: Longest completion, as in ``data.sampling.max_tokens``: there the penalty is whole.
            buffer: Tokens before that over which it rises in a straight line.
            scale: The whole penalty.
        """
        if not 0 < buffer <= max_tokens:
            raise ValueError(f"buffer is {buffer}; it counts the last tokens of {max_tokens}, from 1 on")
        if not scale > 0:
            raise ValueError(f"scale is {scale}; a penalty is above 0")
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
        """Of a completion of so many tokens.

        >>> from lgrpo.rewards import ExactMatch
        >>> reward = OverlongPenalty(ExactMatch(), max_tokens=100, buffer=20)
        >>> [reward.penalty(length) for length in (50, 80, 90, 100)]
        [0.0, 0.0, 0.5, 1.0]
        """
        over = length - (self.max_tokens - self.buffer)
        return self.scale * min(max(over / self.buffer, 0.0), 1.0)
