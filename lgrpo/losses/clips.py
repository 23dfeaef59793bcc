"""Gates that hold the ratio: clips of it, in their several forms."""

from __future__ import annotations

from typing import final

import torch

from lgrpo.functional import (
    ClipCentre,
    clip_band,
    clip_centre,
    clipped_surrogate,
    outside_band,
    sequence_log_ratio,
)
from lgrpo.losses.gates import Gate, Gated, check_band
from lgrpo.losses.terms import Terms, check_choice


class MinClip(Gate):
    """``min(ρA, clip(ρ) A)``: the clip of PPO and GRPO."""

    holds_ratio = True

    def __init__(self, low: float = 0.2, high: float = 0.2, centre: ClipCentre = "one") -> None:
        """
        Args:
            low: How far below the centre the ratio may go before a token with negative advantage stops training.
            high: How far above it, before a token with positive advantage stops.
            centre: Of the band: ``one``; ``proximal``, π_k/α with an additive band (Mroueh et al., equation 6);
                ``proximal_multiplicative``, the same with a band proportional to it (decoupled PPO).
        """
        check_band(low, high)
        check_choice("centre", centre, ("one", "proximal", "proximal_multiplicative"))
        self.low, self.high = low, high
        self.centre: ClipCentre = centre
        self.needs_proximal = self.needs_behaviour = centre != "one"

    def __call__(self, terms: Terms) -> Gated:
        centre = clip_centre(terms.log_ratio, terms.batch.behaviour_logprobs, terms.logprobs.proximal, self.centre)
        multiplicative = self.centre == "proximal_multiplicative"
        low, high = clip_band(centre, self.low, self.high, multiplicative=multiplicative)
        ratio = terms.ratio
        surrogate = clipped_surrogate(ratio, terms.advantages, low, high)
        with torch.no_grad():
            clipped_low, clipped_high = outside_band(ratio, terms.advantages, low, high)
        return Gated(surrogate=surrogate, clipped_low=clipped_low, clipped_high=clipped_high)


@final
class DualClip(MinClip):
    """The min-clip, and a floor of ``cap · A`` where the advantage is negative: a ratio above the cap stops too."""

    def __init__(self, low: float = 0.2, high: float = 0.2, cap: float = 3.0) -> None:
        """
        Args:
            low: How far below 1 the ratio may go before a token with negative advantage stops training.
            high: How far above it, before a token with positive advantage stops.
            cap: The ratio above which a token with negative advantage stops.
        """
        super().__init__(low, high)
        if not cap > 1 + high:
            raise ValueError(f"cap is {cap}; it must lie above the band, which ends at {1 + high}")
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
    """``clip(ρ) A log π_θ``, the clipped ratio without gradient (CISPO): no token ever stops training."""

    holds_ratio = True

    def __init__(self, low: float = 1.0, high: float = 0.2) -> None:
        """
        Args:
            low: How far below 1 the weight may go; at 1 there is no lower bound.
            high: How far above 1.
        """
        check_band(low, high)
        self.low, self.high = low, high

    def __call__(self, terms: Terms) -> Gated:
        weight = terms.ratio.detach().clamp(1 - self.low, 1 + self.high)
        nothing = torch.zeros_like(terms.batch.loss_mask)
        surrogate = weight * terms.advantages * terms.logprobs.policy
        return Gated(surrogate=surrogate, clipped_low=nothing, clipped_high=nothing)


@final
class GeometricClip(Gate):
    """``A`` times the geometric mean of a completion's clipped token ratios (GMPO). For ``SequenceMean``."""

    holds_ratio = True

    def __init__(self, low: float = 0.4, high: float = 0.4) -> None:
        """
        Args:
            low: How far below 0 a token's log-ratio counts where the advantage is negative.
            high: How far above 0 where it is positive.
        """
        if not (low >= 0 and high >= 0):
            raise ValueError(f"low {low} and high {high} are half-widths of a band of log-ratios: 0 or more")
        self.low, self.high = low, high

    def __call__(self, terms: Terms) -> Gated:
        log_ratio, advantages = terms.log_ratio, terms.advantages
        with torch.no_grad():
            clipped_low, clipped_high = outside_band(log_ratio, advantages, -self.low, self.high)
        edge = torch.where(clipped_high, self.high, -self.low)
        clipped = torch.where(clipped_low | clipped_high, edge, log_ratio)
        mean = sequence_log_ratio(clipped, terms.batch.completion_mask).exp()
        return Gated(surrogate=mean * advantages, clipped_low=clipped_low, clipped_high=clipped_high)


@final
class OffPolicySequenceMask(Gate):
    """Stops whole completions with negative advantage that the policy has left behind (DeepSeek-V3.2).

    That is where the mean of ``log π_α/π_θ`` over their tokens exceeds a threshold. Another gate does the rest.
    """

    needs_behaviour = True

    def __init__(self, gate: Gate = MinClip(), threshold: float = 0.5) -> None:  # noqa: B008
        """
        Args:
            gate: For what is left.
            threshold: δ, above 0.
        """
        if not threshold > 0:
            raise ValueError(f"threshold is {threshold}; it must be above 0")
        self.gate = gate
        self.threshold = threshold
        self.reads_ratio = gate.reads_ratio
        self.holds_ratio = gate.holds_ratio
        self.needs_proximal = gate.needs_proximal

    def __call__(self, terms: Terms) -> Gated:
        gated = self.gate(terms)
        with torch.no_grad():
            drift = sequence_log_ratio(
                terms.batch.behaviour_logprobs - terms.logprobs.policy, terms.batch.completion_mask
            )
            gone = (terms.advantages < 0) & (drift > self.threshold)
        gated.surrogate = torch.where(gone, 0.0, gated.surrogate)
        gated.clipped_low = gated.clipped_low | gone
        return gated
