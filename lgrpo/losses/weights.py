"""Weights of the tokens' surrogates. They never have a gradient."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, final

import torch
from torch import Tensor

from lgrpo.checks import check_range
from lgrpo.functional import MAX_LOG_RATIO, sequence_log_ratio
from lgrpo.losses.terms import Terms, check_choice

Level = Literal["token", "sequence", "geometric"]
LEVELS = ("token", "sequence", "geometric")


class Weight(ABC):
    """Weight of each token."""

    is_ratio = False
    """Whether it is made of the loss's ratio; the surrogate must not contain the ratio then."""
    corrects_mismatch = False
    """Whether it is made of π_k/π_α; the loss's ratio must not be over π_α then."""

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
            low: Smallest weight that is kept.
            high: Largest weight that is kept.
            level: Level of π_k/π_α: each ``token``, the product over the ``sequence``, or its ``geometric`` mean.
        """
        check_choice("level", level, LEVELS)
        check_range("low", low, at_least=0, below=high, reason="the upper edge of the band")
        self.low, self.high = low, high
        self.level: Level = level

    def __call__(self, terms: Terms) -> Tensor:
        weight = mismatch(terms, self.level)
        return torch.where((weight >= self.low) & (weight <= self.high), weight, 0.0)


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

    def __call__(self, terms: Terms) -> Tensor:
        return self.weight(terms) * torch.exp2(-terms.lag / self.half_life)


def mismatch(terms: Terms, level: Level) -> Tensor:
    """Return π_k/π_α [B, T], without gradient."""
    log_ratio = terms.proximal_log_ratio.detach()
    if level != "token":
        log_ratio = sequence_log_ratio(log_ratio, terms.batch.completion_mask, level == "geometric")
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
