"""Baselines that are subtracted from rewards."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import final

import torch
from torch import Tensor

from lgrpo.checks import check_range
from lgrpo.functional import leave_one_out_mean, log_mean_exp


class Baseline(ABC):
    """Number subtracted from each reward."""

    uses_rollout = False
    """Whether it is a statistic of the whole rollout instead of each group."""

    @abstractmethod
    def __call__(self, groups: Tensor) -> Tensor:
        """Return the baseline of rewards [P, G], in a shape that broadcasts against them."""


@final
class GroupMean(Baseline):
    """``mean(r)`` of the group, which estimates the behaviour policy's expected reward on the prompt."""

    def __call__(self, groups: Tensor) -> Tensor:
        return groups.mean(1, keepdim=True)


@final
class LeaveOneOut(Baseline):
    """Mean of the siblings, without the completion itself (RLOO)."""

    def __call__(self, groups: Tensor) -> Tensor:
        return leave_one_out_mean(groups)


@final
class BatchMean(Baseline):
    """Mean over the whole rollout."""

    uses_rollout = True

    def __call__(self, groups: Tensor) -> Tensor:
        return groups.mean()


@final
class LogMeanExp(Baseline):
    """``τ log mean exp(r / τ)`` of the group (OPMD): between the mean (τ → ∞) and the best (τ → 0)."""

    def __init__(self, temperature: float = 1.0) -> None:
        """
        Args:
            temperature: Temperature τ, above 0.
        """
        check_range("LogMeanExp's temperature", temperature, above=0)
        self.temperature = temperature

    def __call__(self, groups: Tensor) -> Tensor:
        return log_mean_exp(groups, self.temperature)


@final
class NoBaseline(Baseline):
    """Baseline 0: the advantage is the reward."""

    def __call__(self, groups: Tensor) -> Tensor:
        return torch.zeros_like(groups)
