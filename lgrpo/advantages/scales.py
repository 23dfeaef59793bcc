"""Scales that divide centred rewards."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, final

import torch
from torch import Tensor

from lgrpo.checks import check_range
from lgrpo.functional import bernoulli_std, group_std, has_reward_variance, majority_scale


class Scale(ABC):
    """Number that divides a centred reward."""

    uses_rollout = False
    """Whether it is a statistic of the whole rollout instead of each group."""

    @abstractmethod
    def __call__(self, groups: Tensor, centred: Tensor) -> Tensor:
        """Return the scale of raw and centred rewards [P, G]: positive, in a shape that broadcasts against them."""


def _check_rates(name: str, groups: Tensor) -> None:
    """Raise a ``ValueError`` unless all rewards are from 0 to 1."""
    if bool((groups < 0).any() or (groups > 1).any()):
        raise ValueError(
            f"{name} requires rewards from 0 to 1, but they range from {float(groups.min()):g} to "
            f"{float(groups.max()):g}: use GroupStd"
        )


_NO_DIVISION_BY_0 = "a group without variance would be divided by 0"


@final
class GroupStd(Scale):
    """Standard deviation of the group (GRPO)."""

    def __init__(
        self, eps: float = 1e-4, eps_placement: Literal["inside", "outside"] = "inside", unbiased: bool = False
    ) -> None:
        """
        Args:
            eps: Constant that limits the advantages of groups with little variance.
            eps_placement: Position of ``eps``: ``inside`` the root of the variance (Mroueh et al.) or not (TRL).
            unbiased: Divide the sum of squares by G - 1 instead of G.
        """
        check_range("eps", eps, above=0, reason=_NO_DIVISION_BY_0)
        self.eps = eps
        self.eps_placement = eps_placement
        self.unbiased = unbiased

    def __call__(self, groups: Tensor, centred: Tensor) -> Tensor:
        return group_std(groups, self.eps, self.eps_placement, self.unbiased)


@final
class BernoulliStd(Scale):
    """``√(p (1 - p))`` with a smoothed p, for rewards of 0 and 1: less biased in small groups."""

    def __init__(self, smoothing: float = 1.0) -> None:
        """
        Args:
            smoothing: Number of successes, and of failures, added to each group.
        """
        check_range("smoothing", smoothing, above=0, reason=_NO_DIVISION_BY_0)
        self.smoothing = smoothing

    def __call__(self, groups: Tensor, centred: Tensor) -> Tensor:
        _check_rates("BernoulliStd", groups)
        return bernoulli_std(groups, self.smoothing)


@final
class MajorityStd(Scale):
    """Standard deviation of the group, times ``2 √(p (1 - p))`` if its mean reward p is above ½ (MCPO).

    For rewards of 0 and 1. Groups in which most completions succeed then count as much as those in which half do.
    """

    def __init__(self, eps: float = 1e-6) -> None:
        """
        Args:
            eps: Constant added to the scale.
        """
        check_range("eps", eps, above=0, reason=_NO_DIVISION_BY_0)
        self.eps = eps

    def __call__(self, groups: Tensor, centred: Tensor) -> Tensor:
        _check_rates("MajorityStd", groups)
        return groups.std(1, keepdim=True, correction=0) * majority_scale(groups) + self.eps


@final
class BatchStd(Scale):
    """Standard deviation of all centred rewards of the rollout (REINFORCE++)."""

    uses_rollout = True

    def __init__(self, eps: float = 1e-6) -> None:
        """
        Args:
            eps: Constant added to the standard deviation.
        """
        check_range("eps", eps, above=0, reason=_NO_DIVISION_BY_0)
        self.eps = eps

    def __call__(self, groups: Tensor, centred: Tensor) -> Tensor:
        return centred.std() + self.eps


@final
class GroupMeanScale(Scale):
    """Mean reward of the group (MaxRL): rare successes count more. 1 if every reward is 0."""

    def __call__(self, groups: Tensor, centred: Tensor) -> Tensor:
        if bool((groups < 0).any()):
            raise ValueError("GroupMeanScale divides by a group's mean reward, but a reward is negative: shift them")
        mean = groups.mean(1, keepdim=True)
        return torch.where(mean == 0, 1.0, mean)


@final
class VariedShare(Scale):
    """Share of the rollout's groups whose rewards are not all equal (GPG).

    The other groups have no gradient. The division makes up for them, so that the length of a step does not depend on
    their number. Of P groups of which M have equal rewards the share is (P - M) / P, and 1 if there is no other group.

    >>> groups = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [0.0, 0.0]])
    >>> VariedShare()(groups, groups - groups.mean(1, keepdim=True))
    tensor(0.2500)
    """

    uses_rollout = True

    def __call__(self, groups: Tensor, centred: Tensor) -> Tensor:
        share = has_reward_variance(groups.flatten(), groups.shape[1]).to(groups).mean()
        return torch.where(share == 0, 1.0, share)


@final
class NoScale(Scale):
    """Scale 1."""

    def __call__(self, groups: Tensor, centred: Tensor) -> Tensor:
        return torch.ones_like(centred)
