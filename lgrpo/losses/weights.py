"""What a token's surrogate is multiplied by. Weights never carry a gradient."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, final

import torch
from torch import Tensor

from lgrpo.functional import LARGEST_LOG, sequence_log_ratio
from lgrpo.losses.terms import Terms, check_choice

Level = Literal["token", "sequence", "geometric"]
LEVELS = ("token", "sequence", "geometric")


class Weight(ABC):
    """How much each token counts."""

    is_ratio = False
    """Whether it is made of the loss's ratio: then a surrogate must not hold the ratio too."""
    corrects_mismatch = False
    """Whether it is made of π_k/π_α: then the loss's ratio must not be over π_α too."""

    @abstractmethod
    def __call__(self, terms: Terms) -> Tensor:
        """[B, T]"""


@final
class NoWeight(Weight):
    """1."""

    def __call__(self, terms: Terms) -> Tensor:
        return torch.ones_like(terms.log_ratio)


@final
class Importance(Weight):
    """ρ itself."""

    is_ratio = True

    def __call__(self, terms: Terms) -> Tensor:
        return terms.ratio.detach()


@final
class AsymmetricImportance(Weight):
    """1 where the advantage is positive, ``min(ρ, 1)`` where it is not (TOPR): failures fade as they grow unlikely."""

    is_ratio = True

    def __call__(self, terms: Terms) -> Tensor:
        return torch.where(terms.advantages > 0, 1.0, terms.ratio.detach().clamp(max=1.0))


@final
class TruncatedImportance(Weight):
    """``min(π_k/π_α, cap)``, for a policy that is not quite the one that sampled (TIS)."""

    corrects_mismatch = True

    def __init__(self, cap: float = 2.0, level: Level = "token") -> None:
        """
        Args:
            cap: The most a weight can be.
            level: Of π_k/π_α: each token's, the whole ``sequence``'s product, or its ``geometric`` mean.
        """
        check_choice("level", level, LEVELS)
        if not cap > 0:
            raise ValueError(f"cap is {cap}; it must be above 0")
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
            high: Largest.
            level: Of π_k/π_α: each token's, the whole ``sequence``'s product, or its ``geometric`` mean.
        """
        check_choice("level", level, LEVELS)
        if not 0 <= low < high:
            raise ValueError(f"low {low} and high {high} are no band of weights: 0 <= low < high")
        self.low, self.high = low, high
        self.level: Level = level

    def __call__(self, terms: Terms) -> Tensor:
        weight = mismatch(terms, self.level)
        return torch.where((weight >= self.low) & (weight <= self.high), weight, 0.0)


def mismatch(terms: Terms, level: Level) -> Tensor:
    """π_k/π_α [B, T], without gradient."""
    log_ratio = terms.proximal_log_ratio.detach()
    if level != "token":
        log_ratio = sequence_log_ratio(log_ratio, terms.batch.completion_mask, level == "geometric")
    return log_ratio.clamp(-LARGEST_LOG, LARGEST_LOG).exp()
