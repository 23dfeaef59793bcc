"""Clipped GRPO loss, on-policy or off-policy."""

from __future__ import annotations

import math
from typing import final, get_args

from lgrpo.checks import check_range, check_schedule
from lgrpo.functional import ClipCentre, KLEstimator, RatioDenominator
from lgrpo.losses.aggregation import Aggregation, TokenMean
from lgrpo.losses.clips import MinClip, Schedule
from lgrpo.losses.composed import ComposedLoss
from lgrpo.losses.gates import check_high, check_low
from lgrpo.losses.ratios import TokenRatio
from lgrpo.losses.regularisers import ESTIMATORS, ReferenceKL
from lgrpo.losses.terms import check_choice


@final
class ClippedLoss(ComposedLoss):
    """``-min(ρA, clip(ρ) A) + kl_coef · KL(π_θ ‖ π_ref)`` per token, aggregated over the optimizer step."""

    def __init__(
        self,
        clip_low: Schedule = 0.2,
        clip_high: Schedule = 0.2,
        centre: ClipCentre = "one",
        ratio: RatioDenominator = "behaviour",
        kl_coef: float = 0.0,
        kl: KLEstimator = "k3",
        aggregation: Aggregation = TokenMean(),  # noqa: B008
    ) -> None:
        """
        Args:
            clip_low: Distance below the centre at which a token with negative advantage stops training; or several, by
                the first rollout for which each holds: ``{0: 0.2, 50: 0.6}``.
            clip_high: Distance above the centre at which a token with positive advantage stops training; likewise.
            centre: Centre of the band: ``one``; ``proximal``, π_k/α with an additive band (Mroueh et al., equation 6);
                ``proximal_multiplicative``, the same with a proportional band (decoupled PPO).
            ratio: Denominator of the ratio: ``behaviour`` (π_α), ``proximal`` (π_k), or ``none`` (π_θ, always 1).
            kl_coef: Weight β of the KL term; with 0 no reference model is kept.
            kl: Estimator of the KL term; k1 has no expected gradient on-policy.
            aggregation: Aggregation of tokens to a scalar.
        """
        # the parts check the same values, but by their own names of them
        check_schedule("clip_low", clip_low, check_low)
        check_schedule("clip_high", clip_high, check_high)
        check_choice("ratio", ratio, get_args(RatioDenominator))
        check_range("kl_coef", kl_coef, at_least=0, reason="a negative weight would push away from the reference")
        check_range("kl_coef", kl_coef, below=math.inf)
        check_choice("kl", kl, ESTIMATORS)
        super().__init__(
            ratio=TokenRatio(ratio),
            gate=MinClip(clip_low, clip_high, centre),
            regularisers=[ReferenceKL(kl_coef, kl)] if kl_coef else [],
            aggregation=aggregation,
        )
