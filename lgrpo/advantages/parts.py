"""Advantages from each reward of a weighted sum."""

from __future__ import annotations

from typing import final

from torch import Tensor

from lgrpo.advantages.base import Advantage, Scores
from lgrpo.checks import check_range
from lgrpo.functional import whitened_sum


@final
class DecoupledWhitened(Advantage):
    """GDPO: whiten each reward of a sum within its group, add them up by their weights, whiten over the rollout.

    A reward with a small range then counts as much as one with a large range. For ``rewards.WeightedSum``; a reward
    that is not a sum is its only part.
    """

    needs_parts = True
    uses_zero_variance = True  # equal sums may have different parts

    def __init__(self, eps: float = 1e-4) -> None:
        """
        Args:
            eps: Constant added to each standard deviation.
        """
        check_range("eps", eps, above=0, reason="a group without variance would be divided by 0")
        self.eps = eps

    def __call__(self, scores: Scores) -> Tensor:
        if scores.parts is None:
            raise ValueError("DecoupledWhitened needs each reward of the sum, but there is only the sum")
        rewards, weights = scores.parts.unbind(1)
        total = whitened_sum(rewards, weights, scores.group_size, self.eps)
        return (total - total.mean()) / (total.std() + self.eps)
