"""Rewards of how short an answer is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

from lgrpo.rewards.base import BatchReward, NotYet, Reward, Score, WrappedReward, checked_rewards, combined
from lgrpo.types import Completion, Prompt


@final
class CompletionLength(Reward):
    """1 for completions of up to ``target`` tokens, falling in a straight line to 0 at ``target + width``."""

    is_inline = True

    def __init__(self, target: int, width: int) -> None:
        """
        Args:
            target: Longest completion, in tokens, that gets the whole reward.
            width: Tokens beyond it over which the reward falls to 0.
        """
        if target < 0:
            raise ValueError(f"target is {target}; a completion has no fewer than 0 tokens")
        if width < 1:
            raise ValueError(f"width is {width}; it counts tokens, from 1 on")
        self.target = target
        self.width = width

    def score(self, prompt: Prompt, completion: Completion) -> float:
        return self.of_length(len(completion.token_ids))

    def of_length(self, length: int) -> float:
        """Of a completion of so many tokens.

        >>> reward = CompletionLength(target=100, width=50)
        >>> [reward.of_length(length) for length in (20, 100, 110, 125, 150, 900)]
        [1.0, 1.0, 0.8, 0.5, 0.0, 0.0]
        """
        return 1.0 - min(max((length - self.target) / self.width, 0.0), 1.0)


@final
class Shortest(WrappedReward):
    """Another reward, plus more for the shorter among the siblings of a group (Kimi k1.5, arXiv 2501.12599).

    The shortest gains half of ``weight`` and the longest loses half of it. What is not right, at a reward below 1, can
    lose by its length and not gain.
    """

    def __init__(self, reward: BatchReward, weight: float = 1.0) -> None:
        """
        Args:
            reward: Of the answer itself; 1 and more is right.
            weight: Of the length.
        """
        if not weight > 0:
            raise ValueError(f"weight is {weight}; it must be above 0")
        super().__init__(reward)
        self.weight = weight

    def map_leaves(self, change: Callable[[BatchReward], BatchReward]) -> BatchReward:
        return Shortest(self.reward.map_leaves(change), self.weight)

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Score]:
        scores = checked_rewards(self.reward, prompts, completions)
        extras = shortness([len(completion.token_ids) for completion in completions])
        return [self._sum(score, extra) for score, extra in zip(scores, extras, strict=True)]

    def _sum(self, score: Score, extra: float) -> Score:
        if isinstance(score, NotYet):
            return score
        return combined(score + self.weight * (extra if score >= 1 else min(extra, 0.0)), [score])


def shortness(lengths: Sequence[int]) -> list[float]:
    """½ for the shortest, -½ for the longest, in a straight line; 0 where all are of one length.

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
