"""Advantages from the rewards of whole groups."""

from __future__ import annotations

import math
from typing import Literal, final

from torch import Tensor

from lgrpo.advantages.base import Advantage, Scores
from lgrpo.advantages.baselines import Baseline, GroupMean
from lgrpo.advantages.scales import GroupStd, NoScale, Scale
from lgrpo.checks import check_range
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
            baseline: Number subtracted from each reward.
            scale: Number the difference is divided by.
            shift: Constant added at the end; above 0 it makes all samples more likely (AsymRE).
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
    """GRPO: ``(r - mean) / std`` of the group."""

    def __init__(
        self, eps: float = 1e-4, eps_placement: Literal["inside", "outside"] = "inside", unbiased: bool = False
    ) -> None:
        """
        Args:
            eps: Constant that limits the advantages of groups with little variance.
            eps_placement: Position of ``eps``: ``inside`` the root of the variance (Mroueh et al.) or not (TRL).
            unbiased: Divide the sum of squares by G - 1 instead of G.
        """
        super().__init__(GroupMean(), GroupStd(eps, eps_placement, unbiased))


@final
class DropNegatives(Advantage):
    """RED-Drop: drops random negatives of a group that has more negatives than positives; centres the others.

    Dropped completions have advantage 0. Their tokens still count in the denominator of the loss.
    """

    def __call__(self, scores: Scores) -> Tensor:
        groups = grouped(scores.rewards, scores.group_size)
        kept = drop_negatives(groups, scores.draws.view_as(groups))
        mean = (groups * kept).sum(1, keepdim=True) / kept.sum(1, keepdim=True)
        return ((groups - mean) * kept).flatten()


@final
class ExponentiallyWeighted(Advantage):
    """RED-Weight: ``A exp(A / T)``, so that good completions count more than bad ones.

    The sign of the advantage, and so the effect of every gate, is unchanged.
    """

    def __init__(
        self,
        advantage: Advantage = ComposedAdvantage(),  # noqa: B008
        temperature: float | Literal["adaptive"] = 1.0,
        least_temperature: float = 0.8,
    ) -> None:
        """
        Args:
            advantage: Advantage A.
            temperature: Temperature T, above 0; or ``adaptive``: for each rollout the T at which the sum of
                A exp(A / T) over all tokens is 0, so that long failures do not outweigh short successes.
            least_temperature: Lower limit of an ``adaptive`` T.
        """
        if temperature == "adaptive":
            check_range("least_temperature", least_temperature, above=0)
        else:
            check_range("temperature", temperature, above=0)
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
