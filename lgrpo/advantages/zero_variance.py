"""Advantages of groups whose rewards are all equal."""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor

from lgrpo.advantages.base import Advantage, Scores
from lgrpo.advantages.group import GroupWhitened
from lgrpo.checks import check_range
from lgrpo.functional import has_reward_variance


@final
class SignedZeroVariance(Advantage):
    """``±scale`` for groups whose rewards are all equal, another advantage for the rest (RL-ZVP).

    All siblings of such a group are correct, and become more likely, or all are wrong, and become less likely.
    ``losses.EntropyGuided`` weights their tokens.

    >>> rewards = torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, 0.0])
    >>> scores = Scores(rewards=rewards, lengths=torch.full((6,), 5), draws=torch.zeros(6), group_size=2)
    >>> SignedZeroVariance()(scores)
    tensor([ 0.1000,  0.1000, -0.1000, -0.1000,  0.9998, -0.9998])
    """

    uses_zero_variance = True

    def __init__(
        self,
        advantage: Advantage = GroupWhitened(),  # noqa: B008
        scale: float = 0.1,
        success_reward: float = 1.0,
    ) -> None:
        """
        Args:
            advantage: Advantage of groups with variance.
            scale: Size of the advantage of groups without.
            success_reward: Lowest reward of a correct completion.
        """
        check_range("SignedZeroVariance's scale", scale, above=0, below=math.inf)
        self.advantage = advantage
        self.needs_parts, self.needs_log_ratios = advantage.needs_parts, advantage.needs_log_ratios
        self.scale = scale
        self.success_reward = success_reward

    def __call__(self, scores: Scores) -> Tensor:
        sign = torch.where(scores.rewards >= self.success_reward, 1.0, -1.0).to(scores.rewards)
        varies = has_reward_variance(scores.rewards, scores.group_size)
        return torch.where(varies, self.advantage(scores), self.scale * sign)
