"""Advantages from the rewards of whole groups."""

from __future__ import annotations

import math
from typing import Literal, final

from torch import Tensor

from lgrpo.advantages.base import Advantage, Scores
from lgrpo.advantages.baselines import Baseline, GroupMean
from lgrpo.advantages.scales import GroupStd, NoScale, Scale
from lgrpo.checks import check_range
from lgrpo.functional import adaptive_temperature, drop_negatives, grouped, weighted_mean


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
        return self.of_groups(grouped(scores.rewards, scores.group_size)).flatten()

    def of_groups(self, groups: Tensor) -> Tensor:
        """Return the advantages of rewards [P, G]."""
        centred = groups - self.baseline(groups)
        return centred / self.scale(groups, centred) + self.shift


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
class LengthWeighted(Advantage):
    """OPO: ``r - Σ n r / Σ n`` of the group, with n the tokens of a completion.

    This baseline has the least variance if the squared norm of a completion's gradient is proportional to n.
    """

    def __call__(self, scores: Scores) -> Tensor:
        groups = grouped(scores.rewards, scores.group_size)
        lengths = scores.lengths.view_as(groups).to(groups).clamp(min=1)
        return (groups - weighted_mean(groups, lengths)).flatten()


@final
class LeastVariance(Advantage):
    """VCPO's off-policy baseline: ``(r - Σ w² n r / Σ w² n) / σ`` of the group.

    w is π_k/π_α of a completion and n the number of its tokens, which stands for the squared norm of its gradient, as
    in ``LengthWeighted``. With w = 1 and ``scale`` NoScale the two are equal.

    >>> import torch
    >>> rewards, lengths, ratios = torch.tensor([1.0, 0.0]), torch.tensor([8, 2]), torch.tensor([1.0, 2.0])
    >>> scores = Scores(
    ...     rewards=rewards, lengths=lengths, draws=torch.zeros(2), group_size=2, log_ratios=ratios.log()
    ... )
    >>> LeastVariance(NoScale())(scores)  # both have w² n = 8, so the baseline is 1/2
    tensor([ 0.5000, -0.5000])
    """

    needs_log_ratios = True

    def __init__(self, scale: Scale = GroupStd(1e-6, "outside")) -> None:  # noqa: B008
        """
        Args:
            scale: Number the difference is divided by.
        """
        self.scale = scale

    def __call__(self, scores: Scores) -> Tensor:
        if scores.log_ratios is None:
            raise ValueError("LeastVariance needs π_k/π_α of each completion, but there are no ratios")
        groups = grouped(scores.rewards, scores.group_size)
        lengths, log_ratios = (values.view_as(groups).to(groups) for values in (scores.lengths, scores.log_ratios))
        largest = log_ratios.amax(1, keepdim=True)  # a common factor of the weights, which could overflow
        weights = lengths.clamp(min=1) * (2 * (log_ratios - largest)).exp()
        centred = groups - weighted_mean(groups, weights)
        return (centred / self.scale(groups, centred)).flatten()


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
        self.needs_parts, self.needs_log_ratios = advantage.needs_parts, advantage.needs_log_ratios
        self.temperature = temperature
        self.least_temperature = least_temperature

    def __call__(self, scores: Scores) -> Tensor:
        advantages = self.advantage(scores)
        if self.temperature == "adaptive":
            temperature = adaptive_temperature(advantages, scores.lengths, self.least_temperature)
        else:
            temperature = self.temperature
        return advantages if math.isinf(temperature) else advantages * (advantages / temperature).exp()
