"""Gates that multiply by a clipped ratio."""

from __future__ import annotations

import math
from typing import TypeAlias, final

import torch
from torch import Tensor

from lgrpo.checks import check_count, check_range, check_schedule
from lgrpo.functional import (
    ClipCentre,
    clip_band,
    clip_centre,
    clipped_surrogate,
    outside_band,
    sequence_log_ratio,
    soft_gate,
    two_side,
)
from lgrpo.functional.sync_cycle import value_at
from lgrpo.losses.gates import Gate, Gated, NestedGate, check_band, check_high, check_low
from lgrpo.losses.terms import Terms, check_choice

Schedule: TypeAlias = float | dict[int, float]
"""A value, or several by the first rollout for which each holds."""


class MinClip(Gate):
    """``min(ρA, clip(ρ) A)``: the clip of PPO and GRPO."""

    multiplies_by_ratio = True

    def __init__(self, low: Schedule = 0.2, high: Schedule = 0.2, centre: ClipCentre = "one") -> None:
        """
        Args:
            low: Distance below the centre at which a token with negative advantage stops training; or several, by the
                first rollout for which each holds: ``{0: 0.2, 50: 0.6}``.
            high: Distance above the centre at which a token with positive advantage stops training; likewise.
            centre: Centre of the band: ``one``; ``proximal``, π_k/α with an additive band (Mroueh et al., equation 6);
                ``proximal_multiplicative``, the same with a proportional band (decoupled PPO).
        """
        check_schedule("low", low, check_low)
        check_schedule("high", high, check_high)
        check_choice("centre", centre, ("one", "proximal", "proximal_multiplicative"))
        self.low, self.high = low, high
        self.centre: ClipCentre = centre
        self.needs_proximal = self.needs_behaviour = centre != "one"

    def _band(self, terms: Terms) -> tuple[Tensor, Tensor]:
        centre = clip_centre(terms.log_ratio, terms.batch.behaviour_logprobs, terms.logprobs.proximal, self.centre)
        low, high = value_at(self.low, terms.batch.rollout), value_at(self.high, terms.batch.rollout)
        return clip_band(centre, low, high, multiplicative=self.centre == "proximal_multiplicative")

    def outside_band(self, terms: Terms) -> Tensor:
        return ~two_side(terms.ratio, *self._band(terms))

    def __call__(self, terms: Terms) -> Gated:
        low, high = self._band(terms)
        ratio = terms.ratio
        surrogate = clipped_surrogate(ratio, terms.advantages, low, high)
        with torch.no_grad():
            clipped_low, clipped_high = outside_band(ratio, terms.advantages, low, high)
        return Gated(surrogate=surrogate, clipped_low=clipped_low, clipped_high=clipped_high)


@final
class DualClip(MinClip):
    """``MinClip`` with a floor of ``cap · A`` for negative advantages, where a ratio above the cap stops, too."""

    def __init__(self, low: float = 0.2, high: float = 0.2, cap: float = 3.0) -> None:
        """
        Args:
            low: Distance below 1 at which a token with negative advantage stops training.
            high: Distance above 1 at which a token with positive advantage stops training.
            cap: Ratio above which a token with negative advantage stops training.
        """
        super().__init__(low, high)
        check_range("cap", cap, above=1 + high, reason="the upper edge of the band")
        self.cap = cap

    def __call__(self, terms: Terms) -> Gated:
        gated = super().__call__(terms)
        negative = terms.advantages < 0
        floored = torch.maximum(gated.surrogate, self.cap * terms.advantages)
        gated.surrogate = torch.where(negative, floored, gated.surrogate)
        gated.clipped_high = gated.clipped_high | (negative & (terms.ratio.detach() > self.cap))
        return gated


@final
class WeightClamp(Gate):
    """``clip(ρ) A log π_θ`` with the clipped ratio as a constant (CISPO): no token stops training."""

    multiplies_by_ratio = True

    def __init__(self, low: float = 1.0, high: float = 0.2) -> None:
        """
        Args:
            low: Largest distance of the weight below 1; with 1 there is no lower bound.
            high: Largest distance of the weight above 1.
        """
        check_band(low, high)
        self.low, self.high = low, high

    def outside_band(self, terms: Terms) -> Tensor:
        return ~two_side(terms.ratio, 1 - self.low, 1 + self.high)

    def __call__(self, terms: Terms) -> Gated:
        weight = terms.ratio.detach().clamp(1 - self.low, 1 + self.high)
        none_clipped = torch.zeros_like(terms.batch.loss_mask)
        surrogate = weight * terms.advantages * terms.logprobs.policy
        return Gated(surrogate=surrogate, clipped_low=none_clipped, clipped_high=none_clipped)


@final
class SoftGate(Gate):
    """``4/τ σ(τ(ρ - 1)) A`` (SAPO): a clip without an edge, whose gradient falls off smoothly on both sides of 1.

    The factor of ``A ∇log π_θ`` is ``4 σ(1 - σ) ρ``, 1 at ρ = 1.
    """

    multiplies_by_ratio = True

    def __init__(self, positive: float = 1.0, negative: float = 1.05) -> None:
        """
        Args:
            positive: Temperature τ of tokens with positive advantage.
            negative: Temperature τ of the others; if it is larger, their gradient falls off faster.
        """
        check_range("positive", positive, above=0, below=math.inf)
        check_range("negative", negative, above=0, below=math.inf)
        self.positive, self.negative = positive, negative

    def __call__(self, terms: Terms) -> Gated:
        temperature = torch.where(terms.advantages > 0, self.positive, self.negative)
        none_clipped = torch.zeros_like(terms.batch.loss_mask)
        surrogate = soft_gate(terms.ratio, temperature) * terms.advantages
        return Gated(surrogate=surrogate, clipped_low=none_clipped, clipped_high=none_clipped)


@final
class GeometricClip(Gate):
    """``A`` times the geometric mean of a completion's clipped token ratios (GMPO). For ``SequenceMean``."""

    multiplies_by_ratio = True

    def __init__(self, low: float = 0.4, high: float = 0.4) -> None:
        """
        Args:
            low: Distance below 0 at which a token's log-ratio is clipped if the advantage is negative.
            high: Distance above 0 at which it is clipped if the advantage is positive.
        """
        check_range("low", low, at_least=0)
        check_range("high", high, at_least=0)
        self.low, self.high = low, high

    def outside_band(self, terms: Terms) -> Tensor:
        return ~two_side(terms.log_ratio, -self.low, self.high)

    def __call__(self, terms: Terms) -> Gated:
        log_ratio, advantages = terms.log_ratio, terms.advantages
        with torch.no_grad():
            clipped_low, clipped_high = outside_band(log_ratio, advantages, -self.low, self.high)
        edge = torch.where(clipped_high, self.high, -self.low)
        clipped = torch.where(clipped_low | clipped_high, edge, log_ratio)
        mean = sequence_log_ratio(clipped, terms.batch.completion_mask).exp()
        return Gated(surrogate=mean * advantages, clipped_low=clipped_low, clipped_high=clipped_high)


@final
class MaxTokenLag(NestedGate):
    """Stops tokens that were sampled too long ago. Another gate decides about the others.

    ``data.max_lag`` also leaves such tokens out of the denominators of the loss; this gate keeps them there.
    """

    def __init__(self, gate: Gate = MinClip(), limit: int = 8) -> None:  # noqa: B008
        """
        Args:
            gate: Gate of the other tokens.
            limit: Largest lag, in optimizer steps, of a token that trains. Recorded tokens have no lag.
        """
        super().__init__(gate)
        check_count("limit", limit, at_least=0)
        self.limit = limit

    def __call__(self, terms: Terms) -> Gated:
        gated = self.gate(terms)
        with torch.no_grad():
            stopped, below = terms.lag > self.limit, terms.log_ratio < 0
        gated.surrogate = torch.where(stopped, 0.0, gated.surrogate)
        gated.clipped_low = gated.clipped_low | (stopped & below)
        gated.clipped_high = gated.clipped_high | (stopped & ~below)
        return gated


@final
class OffPolicySequenceMask(NestedGate):
    """Stops completions with negative advantage that became unlikely under the policy (DeepSeek-V3.2).

    A completion stops if the mean of ``log π_α/π_θ`` over its tokens exceeds a threshold. Another gate decides about
    the others.
    """

    needs_behaviour = True

    def __init__(self, gate: Gate = MinClip(), threshold: float = 0.5) -> None:  # noqa: B008
        """
        Args:
            gate: Gate of the other tokens.
            threshold: Threshold δ, above 0.
        """
        super().__init__(gate)
        check_range("threshold", threshold, above=0)
        self.threshold = threshold

    def __call__(self, terms: Terms) -> Gated:
        gated = self.gate(terms)
        with torch.no_grad():
            drift = sequence_log_ratio(
                terms.batch.behaviour_logprobs - terms.logprobs.policy, terms.batch.completion_mask
            )
            stopped = (terms.advantages < 0) & (drift > self.threshold)
        gated.surrogate = torch.where(stopped, 0.0, gated.surrogate)
        gated.clipped_low = gated.clipped_low | stopped
        return gated
