"""Advantages from the rewards of whole groups, whose statistics are the behaviour policy's: it sampled them."""

from __future__ import annotations

import math
from typing import Literal, final

from torch import Tensor

from lgrpo.advantages.base import Advantage, Scores
from lgrpo.advantages.baselines import Baseline, GroupMean
from lgrpo.advantages.scales import GroupStd, NoScale, Scale
from lgrpo.functional import adaptive_temperature, drop_negatives, grouped


class ComposedAdvantage(Advantage):
    """``(r - baseline) / scale + shift``."""

    def __init__(
        self,
        baseline: Baseline = GroupMean(),  # noqa: B008
        scale: Scale = NoScale(),  # noqa: B008
        shift: float = 0.0,
    ) -> None:
        """
        Args:
            baseline: What each reward is compared with.
            scale: What the difference is divided by.
            shift: Added at the end; above 0 it lifts what was sampled (AsymRE).
        """
        self.baseline = baseline
        self.scale = scale
        self.shift = shift

    def __call__(self, scores: Scores) -> Tensor:
        groups = grouped(scores.rewards, scores.group_size)
        centred = groups - self.baseline(groups)
        return (centred / self.scale(groups, centred) + self.shift).flatten()


@final
class GroupWhitened(ComposedAdvantage):
    """GRPO: the reward less its group's mean, over the group's standard deviation."""

    def __init__(
        self, eps: float = 1e-4, eps_placement: Literal["inside", "outside"] = "inside", unbiased: bool = False
    ) -> None:
        """
        Args:
            eps: Keeps a group with little variance from being blown up.
            eps_placement: Added to the variance inside the root (Mroueh et al.), or to the deviation outside it (TRL).
            unbiased: Divide the sum of squares by G - 1 instead of G.
        """
        super().__init__(GroupMean(), GroupStd(eps, eps_placement, unbiased))


@final
class DropNegatives(Advantage):
    """RED-Drop: where negatives outnumber positives the surplus goes, at random; the mean is of the kept.

    What is dropped has advantage 0: it has no say in the surrogate, and its tokens still count in the denominator.
    """

    def __call__(self, scores: Scores) -> Tensor:
        groups = grouped(scores.rewards, scores.group_size)
        kept = drop_negatives(groups, scores.draws.view_as(groups))
        mean = (groups * kept).sum(1, keepdim=True) / kept.sum(1, keepdim=True)
        return ((groups - mean) * kept).flatten()


@final
class ExponentiallyWeighted(Advantage):
    """RED-Weight: ``A exp(A / T)``, so that what was good weighs more than what was bad.

    The weight is a function of the advantage alone, and so a part of it; the sign, and with it every gate, stays.
    """

    def __init__(
        self,
        advantage: Advantage = ComposedAdvantage(),  # noqa: B008
        temperature: float | Literal["adaptive"] = 1.0,
        least_temperature: float = 0.8,
    ) -> None:
        """
        Args:
            advantage: A.
            temperature: T, above 0; or ``adaptive``: for each rollout the T at which the tokens' sum of A exp(A / T)
                is 0, so that long failures do not outweigh short successes.
            least_temperature: The least that ``adaptive`` chooses.
        """
        lowest = least_temperature if temperature == "adaptive" else temperature
        if not lowest > 0:
            raise ValueError(f"the temperature of exp(A / T) is {lowest}; it must be above 0")
        self.advantage = advantage
        self.temperature = temperature
        self.least_temperature = least_temperature

    def __call__(self, scores: Scores) -> Tensor:
        advantages = self.advantage(scores)
        if self.temperature == "adaptive":
            temperature = adaptive_temperature(advantages, scores.lengths, self.least_temperature)
        else:
            temperature = self.temperature
        return advantages if math.isinf(temperature) else advantages * (advantages / temperature).exp()
