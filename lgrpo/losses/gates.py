"""Gates: from advantage and ratio to the surrogate of each token, and which tokens train."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from lgrpo.checks import check_range
from lgrpo.functional import harmful, one_side, ring, second_moment_threshold, two_side
from lgrpo.losses.base import Gather
from lgrpo.losses.terms import Terms


@dataclass(kw_only=True, slots=True)
class Gated:
    """Surrogate of each token, to be maximised, and the tokens without gradient."""

    surrogate: Tensor
    """[B, T], with gradient."""
    clipped_low: Tensor
    """[B, T] bool: no gradient, because the ratio left the band downwards."""
    clipped_high: Tensor
    """[B, T] bool: likewise upwards."""


def check_band(low: float, high: float) -> None:
    """Raise a ``ValueError`` if ``low`` and ``high`` are not half-widths of a band of ratios around 1."""
    check_low("low", low)
    check_high("high", high)


def check_low(name: str, value: float) -> None:
    """Raise a ``ValueError`` if a value is not the distance of a band's lower edge from 1."""
    check_number(name, value)
    check_range(name, value, at_least=0, at_most=1, reason="no ratio is negative")


def check_number(name: str, value: float) -> None:
    """Raise a ``ValueError`` if a value is not a number, such as null in a schedule."""
    if not isinstance(value, int | float):
        raise ValueError(f"{name} is {value}; it must be a number")


def check_high(name: str, value: float) -> None:
    """Raise a ``ValueError`` if a value is not the distance of a band's upper edge from 1."""
    check_number(name, value)
    check_range(name, value, at_least=0)


class Gate(ABC):
    """Decides where the ratio stops a token from training."""

    reads_ratio = True
    """Whether the ratio decides; it then must not be constant 1."""
    multiplies_by_ratio = False
    """Whether the ratio is a factor of the surrogate; a weight must not contain it then."""
    needs_proximal = False
    """Whether log π_k must be kept."""
    needs_behaviour = False
    """Whether log π_α is read, apart from the ratio."""
    surveys_step = False
    """Whether ``survey`` must be called before each optimizer step."""

    def survey(self, parts: Sequence[Terms], gather: Gather) -> None:  # noqa: B027
        """See all tokens of an optimizer step before its first micro-batch; see ``PolicyLoss.survey``."""

    @abstractmethod
    def __call__(self, terms: Terms) -> Gated:
        """Return the surrogate of a micro-batch's tokens."""

    def outside_band(self, terms: Terms) -> Tensor | None:
        """Return the tokens whose ratio is outside the band, for any advantage, [B, T] bool; None without a band."""
        return None


def innermost(gate: Gate) -> Gate:
    """Return the gate inside all nested ones."""
    while isinstance(gate, NestedGate):
        gate = gate.gate
    return gate


class NestedGate(Gate):
    """Gate that stops further tokens of another gate."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.reads_ratio = gate.reads_ratio
        self.multiplies_by_ratio = gate.multiplies_by_ratio
        self.needs_proximal = gate.needs_proximal
        self.surveys_step = gate.surveys_step
        if gate.needs_behaviour:
            self.needs_behaviour = True

    def survey(self, parts: Sequence[Terms], gather: Gather) -> None:
        self.gate.survey(parts, gather)

    def outside_band(self, terms: Terms) -> Tensor | None:
        return self.gate.outside_band(terms)


class MaskGate(Gate):
    """Gate that lets a token train or not: its surrogate is ``A log π_θ`` or 0."""

    @abstractmethod
    def keeps(self, terms: Terms) -> Tensor:
        """Return the tokens that train, [B, T] bool."""

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


class _BandGate(MaskGate):
    """Gate that stops tokens outside a band of ratios around 1."""

    def __init__(self, low: float = 0.2, high: float = 0.2) -> None:
        """
        Args:
            low: Largest distance of the ratio below 1.
            high: Largest distance of the ratio above 1.
        """
        check_band(low, high)
        self.low, self.high = low, high

    def outside_band(self, terms: Terms) -> Tensor:
        return ~two_side(terms.ratio, 1 - self.low, 1 + self.high)


@final
class OneSide(_BandGate):
    """Stops tokens outside the band on the side their advantage pushes to (REC-OneSide)."""

    def keeps(self, terms: Terms) -> Tensor:
        return one_side(terms.ratio, terms.advantages, 1 - self.low, 1 + self.high)


@final
class TwoSide(_BandGate):
    """Stops tokens outside the band, for any advantage (REC-TwoSide)."""

    def keeps(self, terms: Terms) -> Tensor:
        return two_side(terms.ratio, 1 - self.low, 1 + self.high)


@final
class Ring(_BandGate):
    """Stops tokens outside the band, except those far outside whose advantage pulls them back (REC-Ring)."""

    def __init__(self, low: float = 0.2, high: float = 0.2, outer_low: float = 0.6, outer_high: float = 2.0) -> None:
        """
        Args:
            low: Largest distance of the ratio below 1.
            high: Largest distance of the ratio above 1.
            outer_low: Distance below 1 beyond which a token with positive advantage trains again.
            outer_high: Distance above 1 beyond which a token with negative advantage trains again.
        """
        super().__init__(low, high)
        check_low("outer_low", outer_low)
        check_high("outer_high", outer_high)
        check_range("outer_low", outer_low, at_least=low, reason="the inner band")
        check_range("outer_high", outer_high, at_least=high, reason="the inner band")
        self.outer_low, self.outer_high = outer_low, outer_high

    def keeps(self, terms: Terms) -> Tensor:
        edges = 1 - self.low, 1 + self.high, 1 - self.outer_low, 1 + self.outer_high
        return ring(terms.ratio, terms.advantages, *edges)


@final
class SecondMoment(MaskGate):
    """Stops the harmful tokens with the largest ``(log ρ)²`` until their mean is within a limit (M2PO).

    The mean is over the optimizer step, all micro-batches and ranks: one pass without gradient finds the threshold. A
    batch that was not part of such a survey is taken for the whole step.
    """

    surveys_step = True

    def __init__(self, limit: float = 0.04) -> None:
        """
        Args:
            limit: Upper limit of the mean.
        """
        check_range("limit", limit, above=0, reason="otherwise no token whose ratio is not 1 would train")
        self.limit = limit
        self._surveyed: tuple[int, int] | None = None
        self._threshold = math.inf

    def survey(self, parts: Sequence[Terms], gather: Gather) -> None:
        squares = gather(torch.cat([_harmful_squares(part) for part in parts]))
        self._threshold = second_moment_threshold(squares, self.limit)
        self._surveyed = step_of(parts[0])

    def keeps(self, terms: Terms) -> Tensor:
        threshold = self._threshold
        if self._surveyed != step_of(terms):
            threshold = second_moment_threshold(_harmful_squares(terms), self.limit)
        return ~harmful(terms.log_ratio, terms.advantages) | (terms.log_ratio.square() <= threshold)


def _harmful_squares(terms: Terms) -> Tensor:
    """Return (log ρ)² of the harmful tokens [n]."""
    return terms.log_ratio[terms.batch.loss_mask & harmful(terms.log_ratio, terms.advantages)].square()


def step_of(terms: Terms) -> tuple[int, int]:
    """Return what identifies an optimizer step: the rollout, and the steps before it."""
    return terms.batch.rollout, terms.logprobs.step
