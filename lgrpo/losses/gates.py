"""Which tokens train, and how the ratio enters: from advantage and ratio to the surrogate of each token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from lgrpo.functional import (
    one_side,
    ring,
    two_side,
    within_second_moment,
)
from lgrpo.losses.terms import Terms


@dataclass(kw_only=True, slots=True)
class Gated:
    """The surrogate of each token, to be maximised, and the tokens that have no gradient."""

    surrogate: Tensor
    """[B, T], with gradient."""
    clipped_low: Tensor
    """[B, T] bool: no gradient, because the ratio left the band downwards."""
    clipped_high: Tensor
    """[B, T] bool: likewise upwards."""


def check_band(low: float, high: float) -> None:
    """Refuses a band of ratios that is none."""
    if not (0 <= low <= 1 and high >= 0):
        raise ValueError(
            f"low {low} and high {high} are half-widths of a band around 1: low from 0 to 1, since no ratio is "
            "negative, high 0 or more"
        )


class Gate(ABC):
    """Decides where the ratio stops a token from training."""

    reads_ratio = True
    """Whether the ratio decides: then a ratio that is always 1 makes no sense."""
    holds_ratio = False
    """Whether the ratio is a factor of the surrogate: then a weight must not bring it in again."""
    needs_proximal = False
    """Whether log π_k must be kept."""
    needs_behaviour = False
    """Whether log π_α is read, beyond what the ratio does."""

    @abstractmethod
    def __call__(self, terms: Terms) -> Gated:
        """The surrogate of a micro-batch's tokens."""


class MaskGate(Gate):
    """A gate that lets a token train or not: its surrogate is ``A log π_θ``, or nothing."""

    @abstractmethod
    def keeps(self, terms: Terms) -> Tensor:
        """[B, T] bool: the tokens that train."""

    def __call__(self, terms: Terms) -> Gated:
        with torch.no_grad():
            kept = self.keeps(terms)
            below = terms.log_ratio < 0
        surrogate = torch.where(kept, terms.advantages * terms.logprobs.policy, 0.0)
        return Gated(surrogate=surrogate, clipped_low=~kept & below, clipped_high=~kept & ~below)


@final
class NoGate(MaskGate):
    """Every token trains."""

    reads_ratio = False

    def keeps(self, terms: Terms) -> Tensor:
        return torch.ones_like(terms.batch.loss_mask)


@final
class OneSide(MaskGate):
    """Stops tokens outside the band on the side their advantage pushes to (REC-OneSide)."""

    def __init__(self, low: float = 0.2, high: float = 0.2) -> None:
        """
        Args:
            low: How far below 1 the ratio may be where the advantage is negative.
            high: How far above 1 where it is positive.
        """
        check_band(low, high)
        self.low, self.high = low, high

    def keeps(self, terms: Terms) -> Tensor:
        return one_side(terms.ratio, terms.advantages, 1 - self.low, 1 + self.high)


@final
class TwoSide(MaskGate):
    """Stops tokens outside the band, whatever their advantage (REC-TwoSide)."""

    def __init__(self, low: float = 0.2, high: float = 0.2) -> None:
        """
        Args:
            low: How far below 1 the ratio may be.
            high: How far above 1.
        """
        check_band(low, high)
        self.low, self.high = low, high

    def keeps(self, terms: Terms) -> Tensor:
        return two_side(terms.ratio, 1 - self.low, 1 + self.high)


@final
class Ring(MaskGate):
    """Stops tokens outside the band, except far outside where the advantage pulls them back (REC-Ring)."""

    def __init__(self, low: float = 0.2, high: float = 0.2, outer_low: float = 0.6, outer_high: float = 2.0) -> None:
        """
        Args:
            low: How far below 1 the ratio may be.
            high: How far above 1.
            outer_low: Further below 1 than this, a token with positive advantage trains again.
            outer_high: Further above 1 than this, a token with negative advantage trains again.
        """
        check_band(low, high)
        check_band(outer_low, outer_high)
        if outer_low < low or outer_high < high:
            raise ValueError(f"the outer edges {outer_low}, {outer_high} lie inside the band {low}, {high}")
        self.low, self.high, self.outer_low, self.outer_high = low, high, outer_low, outer_high

    def keeps(self, terms: Terms) -> Tensor:
        edges = 1 - self.low, 1 + self.high, 1 - self.outer_low, 1 + self.outer_high
        return ring(terms.ratio, terms.advantages, *edges)


@final
class SecondMoment(MaskGate):
    """Stops the tokens furthest off until the mean ``(log ρ)²`` of the harmful ones is within a limit (M2PO).

    The mean is taken over a micro-batch, since the ratios of the others are not known yet.
    """

    def __init__(self, limit: float = 0.04) -> None:
        """
        Args:
            limit: Of the mean.
        """
        if not limit > 0:
            raise ValueError(f"limit is {limit}; at 0 and below no token that moved would ever train")
        self.limit = limit

    def keeps(self, terms: Terms) -> Tensor:
        return within_second_moment(terms.log_ratio, terms.advantages, terms.batch.loss_mask, self.limit)
