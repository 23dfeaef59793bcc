"""What a reward is compared with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import final

import torch
from torch import Tensor

from lgrpo.functional import leave_one_out_mean, log_mean_exp


class Baseline(ABC):
    """Taken from each reward."""

    @abstractmethod
    def __call__(self, groups: Tensor) -> Tensor:
        """Of rewards [P, G]; something that broadcasts against them."""


@final
class GroupMean(Baseline):
    """``mean(r)`` of the group: an estimate of what the behaviour policy earns on the prompt."""

    def __call__(self, groups: Tensor) -> Tensor:
        return groups.mean(1, keepdim=True)


@final
class LeaveOneOut(Baseline):
    """The mean of the siblings, the completion itself left out (RLOO)."""

    def __call__(self, groups: Tensor) -> Tensor:
        return leave_one_out_mean(groups)


@final
class BatchMean(Baseline):
    """The mean over the whole rollout."""

    def __call__(self, groups: Tensor) -> Tensor:
        return groups.mean()


@final
class LogMeanExp(Baseline):
    """``τ log mean exp(r / τ)`` of the group (OPMD): between the mean (τ → ∞) and the best (τ → 0)."""

    def __init__(self, temperature: float = 1.0) -> None:
        """
        Args:
            temperature: τ, above 0.
        """
        if not temperature > 0:
            raise ValueError(f"LogMeanExp's temperature is {temperature}; it must be above 0")
        self.temperature = temperature

    def __call__(self, groups: Tensor) -> Tensor:
        return log_mean_exp(groups, self.temperature)


@final
class NoBaseline(Baseline):
    """0: the reward stands for itself."""

    def __call__(self, groups: Tensor) -> Tensor:
        return torch.zeros_like(groups)
