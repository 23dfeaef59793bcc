"""Advantages from a group's own statistics, which are the behaviour policy's: it sampled the group."""

from __future__ import annotations

from typing import Literal, final

from torch import Tensor

from lgrpo.advantages.base import Advantage
from lgrpo.functional import group_centred, group_whitened, leave_one_out


@final
class GroupWhitened(Advantage):
    """GRPO: the centred reward over the group's standard deviation."""

    def __init__(
        self, eps: float = 1e-4, eps_placement: Literal["inside", "outside"] = "inside", unbiased: bool = False
    ) -> None:
        """
        Args:
            eps: Keeps a group with little variance from being blown up.
            eps_placement: Added to the variance inside the root (Mroueh et al.), or to the deviation outside it (TRL).
            unbiased: Divide the sum of squares by G - 1 instead of G.
        """
        if not eps > 0:
            raise ValueError(f"eps is {eps}; it must be above 0, or a group without variance is divided by 0")
        self.eps = eps
        self.eps_placement = eps_placement
        self.unbiased = unbiased

    def __call__(self, rewards: Tensor, group_size: int) -> Tensor:
        return group_whitened(rewards, group_size, self.eps, self.eps_placement, self.unbiased)


@final
class GroupCentred(Advantage):
    """The reward less the group's mean: REINFORCE with the group as baseline."""

    def __call__(self, rewards: Tensor, group_size: int) -> Tensor:
        return group_centred(rewards, group_size)


@final
class LeaveOneOut(Advantage):
    """The reward less the mean of the siblings' (RLOO)."""

    def __call__(self, rewards: Tensor, group_size: int) -> Tensor:
        return leave_one_out(rewards, group_size)
