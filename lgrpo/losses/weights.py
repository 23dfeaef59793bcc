"""Weights of the tokens' surrogates. They never have a gradient."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Literal, final

import torch
from torch import Tensor

from lgrpo.checks import check_range
from lgrpo.functional import (
    MAX_LOG_RATIO,
    entropy_weight,
    gamma_weight,
    k2_of_ratio,
    k3_of_ratio,
    sequence_log_ratio,
    sequence_max,
)
from lgrpo.losses.terms import Terms, check_choice

Level = Literal["token", "sequence", "geometric"]
LEVELS = ("token", "sequence", "geometric")


class Weight(ABC):
    """Weight of each token."""

    is_ratio = False
    """Whether it is made of the loss's ratio; the surrogate must not contain the ratio then."""
    corrects_mismatch = False
    """Whether it is made of π_k/π_α; the loss's ratio must not be over π_α then."""
    reads_mismatch = False
    """Whether π_k/π_α is read without being a factor."""
    needs_zero_variance = False
    """Whether it acts on groups whose rewards are all equal, which must not be masked then."""

    @abstractmethod
    def __call__(self, terms: Terms) -> Tensor:
        """Return weights [B, T]."""


@final
class NoWeight(Weight):
    """Weight 1."""

    def __call__(self, terms: Terms) -> Tensor:
        return torch.ones_like(terms.log_ratio)


@final
class Importance(Weight):
    """Weight ρ."""

    is_ratio = True

    def __call__(self, terms: Terms) -> Tensor:
        return terms.ratio.detach()


@final
class AsymmetricImportance(Weight):
    """1 if the advantage is positive, else ``min(ρ, 1)`` (TOPR): unlikely failures count less."""

    is_ratio = True

    def __call__(self, terms: Terms) -> Tensor:
        return torch.where(terms.advantages > 0, 1.0, terms.ratio.detach().clamp(max=1.0))


@final
class GammaWeight(Weight):
    """``ρ^k e^{λ(1 - ρ)}`` (VESPO): 1 at ρ = 1, small for very small and very large ratios.

    For the ratio of a whole completion, ``SequenceRatio`` with ``mean: product``. The weight is largest at ρ = k/λ.
    """

    is_ratio = True

    def __init__(
        self,
        positive_shape: float = 2.0,
        positive_rate: float = 3.0,
        negative_shape: float = 3.0,
        negative_rate: float = 2.0,
    ) -> None:
        """
        Args:
            positive_shape: Exponent k if the advantage is not negative: larger, the less do small ratios count.
            positive_rate: Rate λ if the advantage is not negative: larger, the less do large ratios count.
            negative_shape: Exponent k of negative advantages.
            negative_rate: Rate λ of negative advantages.
        """
        self.positive_shape, self.positive_rate = positive_shape, positive_rate
        self.negative_shape, self.negative_rate = negative_shape, negative_rate
        for name, value in vars(self).items():
            check_range(name, value, above=0, below=math.inf)

    def __call__(self, terms: Terms) -> Tensor:
        negative = terms.advantages < 0
        shape = torch.where(negative, self.negative_shape, self.positive_shape)
        rate = torch.where(negative, self.negative_rate, self.positive_rate)
        return gamma_weight(terms.log_ratio.detach(), shape, rate)


@final
class TruncatedImportance(Weight):
    """``min(π_k/π_α, cap)``, which corrects the mismatch of trainer and engine (TIS)."""

    corrects_mismatch = True

    def __init__(self, cap: float = 2.0, level: Level = "token") -> None:
        """
        Args:
            cap: Largest weight.
            level: Level of π_k/π_α: each ``token``, the product over the ``sequence``, or its ``geometric`` mean.
        """
        check_choice("level", level, LEVELS)
        check_range("cap", cap, above=0)
        self.cap = cap
        self.level: Level = level

    def __call__(self, terms: Terms) -> Tensor:
        return mismatch(terms, self.level).clamp(max=self.cap)


@final
class MaskedImportance(Weight):
    """``π_k/π_α`` inside a band, 0 outside (MIS)."""

    corrects_mismatch = True

    def __init__(self, low: float = 0.5, high: float = 2.0, level: Level = "token") -> None:
        """
        Args:
            low: Smallest weight that is kept, below 1.
            high: Largest weight that is kept, above 1.
            level: Level of π_k/π_α: each ``token``, the product over the ``sequence``, or its ``geometric`` mean.
        """
        check_choice("level", level, LEVELS)
        check_range("low", low, at_least=0, below=1, reason="a ratio of 1 must be kept")
        check_range("high", high, above=1, reason="a ratio of 1 must be kept")
        self.low, self.high = low, high
        self.level: Level = level

    def __call__(self, terms: Terms) -> Tensor:
        weight = mismatch(terms, self.level)
        return torch.where((weight >= self.low) & (weight <= self.high), weight, 0.0)


@final
class Rejection(Weight):
    """Another weight where π_k is near π_α, 0 elsewhere: rejects tokens or whole completions.

    The statistic is the ratio ``ρ = π_k/π_α``, which must be inside a band, or ``k2 = (log ρ)² / 2`` or
    ``k3 = ρ - 1 - log ρ``, which must not be above its upper edge.
    """

    reads_mismatch = True

    def __init__(
        self,
        weight: Weight = NoWeight(),  # noqa: B008
        statistic: Literal["ratio", "k2", "k3"] = "ratio",
        level: Literal["token", "sequence", "geometric", "max"] = "geometric",
        high: float = 1.001,
        low: float | None = None,
    ) -> None:
        """
        Args:
            weight: Weight of the tokens that are kept.
            statistic: Statistic of π_k/π_α: the ``ratio`` itself, ``k2`` or ``k3``.
            level: Level of the statistic: each ``token``; the ``sequence`` (product of the ratios, sum of k2 or k3);
                their ``geometric`` mean (mean of k2 or k3); or the ``max`` of k2 or k3 over the tokens.
            high: Largest value that is kept.
            low: Smallest ratio that is kept; the default is 1 / high. Only for ``ratio``.
        """
        check_choice("statistic", statistic, ("ratio", "k2", "k3"))
        check_choice("level", level, (*LEVELS, "max"))
        if statistic == "ratio":
            if level == "max":
                raise ValueError("level is 'max', which is for k2 and k3; a ratio needs token, sequence or geometric")
            check_range("high", high, above=1, reason="a ratio of 1 must be kept")
            check_range("low", low, at_least=0, below=1, reason="a ratio of 1 must be kept")
        else:
            check_range("high", high, above=0)
            if low is not None:
                raise ValueError(f"low is {low}, but {statistic} has an upper limit only: remove low")
        self.weight, self.statistic = weight, statistic
        self.level: Literal["token", "sequence", "geometric", "max"] = level
        self.high = high
        self.low = 1 / high if low is None else low
        self.is_ratio = weight.is_ratio
        self.corrects_mismatch = weight.corrects_mismatch
        self.needs_zero_variance = weight.needs_zero_variance

    def __call__(self, terms: Terms) -> Tensor:
        return torch.where(self._keeps(terms), self.weight(terms), 0.0)

    def _keeps(self, terms: Terms) -> Tensor:
        mask = terms.batch.completion_mask
        log_ratio = terms.proximal_log_ratio.detach()
        if self.statistic == "ratio":
            if self.level != "token":
                log_ratio = sequence_log_ratio(log_ratio, mask, self.level == "geometric")
            ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
            return (ratio >= self.low) & (ratio <= self.high)
        log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        values = k2_of_ratio(log_ratio) if self.statistic == "k2" else k3_of_ratio(log_ratio)
        if self.level == "max":
            values = sequence_max(values, mask)
        elif self.level != "token":
            values = sequence_log_ratio(values, mask, self.level == "geometric")
        return values <= self.high


@final
class LagDecay(Weight):
    """``½^(lag / half_life)`` times another weight: a token counts less the longer ago it was sampled."""

    def __init__(self, half_life: float = 8.0, weight: Weight = NoWeight()) -> None:  # noqa: B008
        """
        Args:
            half_life: Lag, in optimizer steps, at which a token counts half.
            weight: Weight that is multiplied.
        """
        check_range("half_life", half_life, above=0)
        self.half_life = half_life
        self.weight = weight
        self.is_ratio = weight.is_ratio
        self.corrects_mismatch = weight.corrects_mismatch
        self.needs_zero_variance = weight.needs_zero_variance
        self.reads_mismatch = weight.reads_mismatch

    def __call__(self, terms: Terms) -> Tensor:
        return self.weight(terms) * torch.exp2(-terms.lag / self.half_life)


@final
class EntropyGuided(Weight):
    """Weight of tokens of groups whose rewards are all equal (RL-ZVP); 1 for the others.

    With H the entropy at a token, it is H if the advantage is positive, and the largest H of the completion minus H
    otherwise: uncertain tokens of correct completions become more likely, and certain tokens of wrong ones less. For
    ``advantages.SignedZeroVariance``.
    """

    needs_zero_variance = True

    def __call__(self, terms: Terms) -> Tensor:
        weight = entropy_weight(terms.logprobs.entropy.detach(), terms.batch.completion_mask, terms.advantages)
        return torch.where(terms.zero_variance[:, None], weight, 1.0)


def mismatch(terms: Terms, level: Level) -> Tensor:
    """Return π_k/π_α [B, T], without gradient."""
    log_ratio = terms.proximal_log_ratio.detach()
    if level != "token":
        log_ratio = sequence_log_ratio(log_ratio, terms.batch.completion_mask, level == "geometric")
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
