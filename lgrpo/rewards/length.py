"""Rewards that depend on the length of completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

from lgrpo.checks import check_range
from lgrpo.rewards.base import BatchReward, NotYet, Reward, Score, WrappedReward, checked_rewards, combined
from lgrpo.types import Completion, Prompt


@final
class CompletionLength(Reward):
    """1 for completions of up to ``target`` tokens, falling linearly to 0 at ``target + width``."""

    is_inline = True

    def __init__(self, target: int, width: int) -> None:
        """
        Args:
            target: Longest completion, in tokens, with reward 1.
            width: Number of further tokens over which the reward falls to 0.
        """
        check_range("target", target, at_least=0)
        check_range("width", width, at_least=1)
        self.target = target
        self.width = width

    def score(self, prompt: Prompt, completion: Completion) -> float:
        return self.of_length(completion.num_sampled)

    def of_length(self, length: int) -> float:
        """Return the reward of a completion of ``length`` tokens.

        >>> reward = CompletionLength(target=100, width=50)
        >>> [reward.of_length(length) for length in (20, 100, 110, 125, 150, 900)]
        [1.0, 1.0, 0.8, 0.5, 0.0, 0.0]
        """
        return 1.0 - min(max((length - self.target) / self.width, 0.0), 1.0)


@final
class Shortest(WrappedReward):
    """Another reward, plus a bonus for the shorter completions of a group (Kimi k1.5, arXiv 2501.12599).

    The shortest gains half of ``weight`` and the longest loses half of it. A wrong completion, one with a reward below
    1, can lose by its length but not gain.
    """

    def __init__(self, reward: BatchReward, weight: float = 1.0) -> None:
        """
        Args:
            reward: Reward of the answer; a completion is right at 1 or above.
            weight: Weight of the length.
        """
        check_range("weight", weight, above=0)
        super().__init__(reward)
        self.weight = weight

    def map_leaves(self, change: Callable[[BatchReward], BatchReward]) -> BatchReward:
        return Shortest(self.reward.map_leaves(change), self.weight)

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Score]:
        scores = checked_rewards(self.reward, prompts, completions)
        bonuses = shortness([completion.num_sampled for completion in completions])
        return [self._sum(score, bonus) for score, bonus in zip(scores, bonuses, strict=True)]

    def _sum(self, score: Score, bonus: float) -> Score:
        if isinstance(score, NotYet):
            return score
        return combined(score + self.weight * (bonus if score >= 1 else min(bonus, 0.0)), [score])


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
            score if isinstance(score, NotYet) else combined(score - self.penalty(c.num_sampled), [score])
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


def shortness(lengths: Sequence[int]) -> list[float]:
    """Map lengths linearly to ½ for the shortest and -½ for the longest; to 0 if all are equal.

    >>> shortness([10, 20, 40, 50])
    [0.5, 0.25, -0.25, -0.5]
    >>> shortness([7, 7])
    [0.0, 0.0]
    """
    if not lengths:
        return []
    shortest, longest = min(lengths), max(lengths)
    if shortest == longest:
        return [0.0] * len(lengths)
    return [0.5 - (length - shortest) / (longest - shortest) for length in lengths]
