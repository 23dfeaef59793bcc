"""What a centred reward is divided by."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, final

import torch
from torch import Tensor

from lgrpo.functional import bernoulli_std, group_std


class Scale(ABC):
    """Divides the reward less its baseline."""

    @abstractmethod
    def __call__(self, groups: Tensor, centred: Tensor) -> Tensor:
        """Of rewards [P, G], raw and less their baseline; something positive that broadcasts against them."""


def check_eps(eps: float) -> None:
    """Refuses an ``eps`` that would let a division by 0 happen."""
    if not eps > 0:
        raise ValueError(f"eps is {eps}; it must be above 0, or a group without variance is divided by 0")


@final
class GroupStd(Scale):
    """The group's standard deviation (GRPO)."""

    def __init__(
        self, eps: float = 1e-4, eps_placement: Literal["inside", "outside"] = "inside", unbiased: bool = False
    ) -> None:
        """
        Args:
            eps: Keeps a group with little variance from being blown up.
            eps_placement: Added to the variance inside the root (Mroueh et al.), or to the deviation outside it (TRL).
            unbiased: Divide the sum of squares by G - 1 instead of G.
        """
        check_eps(eps)
        self.eps = eps
        self.eps_placement = eps_placement
        self.unbiased = unbiased

    def __call__(self, groups: Tensor, centred: Tensor) -> Tensor:
        return group_std(groups, self.eps, self.eps_placement, self.unbiased)


@final
class BernoulliStd(Scale):
    """``√(p (1 - p))``, the deviation of a reward that is 0 or 1, from a smoothed p: less biased in small groups."""

    def __init__(self, smoothing: float = 1.0) -> None:
        """
        Args:
            smoothing: Successes and failures added to each group's own.
        """
        if not smoothing > 0:
            raise ValueError(
                f"smoothing is {smoothing}; it must be above 0, or a group without variance is divided by 0"
            )
        self.smoothing = smoothing

    def __call__(self, groups: Tensor, centred: Tensor) -> Tensor:
        if bool((groups < 0).any() or (groups > 1).any()):
            raise ValueError(
                f"BernoulliStd takes rewards for chances, from 0 to 1, but they go from {float(groups.min()):g} to "
                f"{float(groups.max()):g}: use GroupStd"
            )
        return bernoulli_std(groups, self.smoothing)


@final
class BatchStd(Scale):
    """The standard deviation of all centred rewards of the rollout (REINFORCE++)."""

    def __init__(self, eps: float = 1e-6) -> None:
        """
        Args:
            eps: Added to the deviation.
        """
        check_eps(eps)
        self.eps = eps

    def __call__(self, groups: Tensor, centred: Tensor) -> Tensor:
        return centred.std() + self.eps


@final
class GroupMeanScale(Scale):
    """The group's mean reward (MaxRL): the rarer a success, the more it counts. 1 where every reward is 0."""

    def __call__(self, groups: Tensor, centred: Tensor) -> Tensor:
        if bool((groups < 0).any()):
            raise ValueError("GroupMeanScale divides by a group's mean reward, and a reward is negative: shift them")
        mean = groups.mean(1, keepdim=True)
        return torch.where(mean == 0, 1.0, mean)


@final
class NoScale(Scale):
    """1."""

    def __call__(self, groups: Tensor, centred: Tensor) -> Tensor:
        return torch.ones_like(centred)
