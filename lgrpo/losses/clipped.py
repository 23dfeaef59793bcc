"""The clipped GRPO loss, on-policy or off."""

from __future__ import annotations

from typing import final

import torch

from lgrpo.functional import (
    ClipCentre,
    KLEstimator,
    RatioDenominator,
    clip_band,
    clip_centre,
    clipped_surrogate,
    kl_divergence,
    log_ratio,
    outside_band,
)
from lgrpo.losses.aggregation import Aggregation, TokenMean
from lgrpo.losses.base import LossOutput, PolicyLogprobs, PolicyLoss
from lgrpo.types import RolloutBatch


@final
class ClippedLoss(PolicyLoss):
    """``-min(ρA, clip(ρ) A) + kl_coef · KL(π_θ ‖ π_ref)`` per token, aggregated over the optimizer step."""

    def __init__(
        self,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        centre: ClipCentre = "one",
        ratio: RatioDenominator = "behaviour",
        kl_coef: float = 0.0,
        kl: KLEstimator = "k3",
        aggregation: Aggregation = TokenMean(),  # noqa: B008
    ) -> None:
        """
        Args:
            clip_low: How far below the centre the ratio may go before a token with negative advantage stops training.
            clip_high: How far above it, before a token with positive advantage stops.
            centre: Of the band: ``one``; ``proximal``, π_k/α with an additive band (Mroueh et al., equation 6);
                ``proximal_multiplicative``, the same with a band proportional to it (decoupled PPO).
            ratio: What π_θ is divided by: ``behaviour`` (π_α), ``proximal`` (π_k), or ``none`` (itself: always 1).
            kl_coef: Weight β of the KL term. At 0 no reference model is kept.
            kl: Estimator of the KL term.
            aggregation: From tokens to a scalar.
        """
        if not (clip_low >= 0 and clip_high >= 0):
            raise ValueError(f"clip_low {clip_low} and clip_high {clip_high} are half-widths: 0 or more")
        if centre != "one" and ratio != "behaviour":
            raise ValueError(
                f"clip centre {centre!r} is π_k/α, a centre for a ratio over the behaviour policy; with ratio "
                f"{ratio!r} use centre 'one'"
            )
        if kl_coef < 0:
            raise ValueError(f"kl_coef is {kl_coef}; a negative weight would push away from the reference")
        self.clip_low = clip_low
        self.clip_high = clip_high
        self.centre: ClipCentre = centre
        self.ratio: RatioDenominator = ratio
        self.kl_coef = kl_coef
        self.kl: KLEstimator = kl
        self.aggregation = aggregation

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef > 0

    @property
    def needs_proximal(self) -> bool:
        return self.centre != "one" or self.ratio == "proximal"

    def __call__(self, batch: RolloutBatch, logprobs: PolicyLogprobs) -> LossOutput:
        log_rho = log_ratio(logprobs.policy, batch.behaviour_logprobs, logprobs.proximal, self.ratio)
        ratio = log_rho.exp()
        centre = clip_centre(log_rho, batch.behaviour_logprobs, logprobs.proximal, self.centre)
        low, high = clip_band(
            centre, self.clip_low, self.clip_high, multiplicative=self.centre == "proximal_multiplicative"
        )
        values = -clipped_surrogate(ratio, batch.advantages, low, high)
        if self.needs_reference:
            if logprobs.reference is None:
                raise ValueError("kl_coef is above 0, but there are no reference log-probabilities")
            values = values + self.kl_coef * kl_divergence(logprobs.policy, logprobs.reference, self.kl)
        with torch.no_grad():
            clipped_low, clipped_high = outside_band(ratio, batch.advantages, low, high)
        return LossOutput(
            loss=self.aggregation(values, batch),
            ratio=ratio.detach(),
            clipped_low=clipped_low,
            clipped_high=clipped_high,
        )
