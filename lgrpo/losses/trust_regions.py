"""Gates that limit a distance from the behaviour policy other than the ratio."""

from __future__ import annotations

import math
from typing import Literal, final

import torch
from torch import Tensor

from lgrpo.checks import check_range
from lgrpo.functional import (
    MAX_LOG_RATIO,
    Divergence,
    follows_trigger,
    sequence_max,
    token_divergence,
    within_divergence,
    within_entropy_band,
)
from lgrpo.losses.clips import MinClip
from lgrpo.losses.gates import Gate, Gated, MaskGate, NestedGate, NoGate
from lgrpo.losses.terms import Terms, check_choice


@final
class DivergenceMask(MaskGate):
    """Stops tokens whose probability is too far from α's, if their advantage pushes them farther away (DPPO).

    The distance is the total variation ``|π - α|`` of a token, or its binary KL
    ``α log α/π + (1 - α) log (1 - α)/(1 - π)``. A rare token may change its ratio a lot before it stops, a common one
    only little.
    """

    reads_ratio = False
    needs_behaviour = True

    def __init__(self, low: float = 0.15, high: float = 0.15, divergence: Divergence = "tv") -> None:
        """
        Args:
            low: Distance from which a token with negative advantage stops training, if π < α.
            high: Distance from which a token with positive advantage stops training, if π > α.
            divergence: Distance: ``tv`` (total variation, at most 1) or ``kl`` (binary KL).
        """
        check_choice("divergence", divergence, ("tv", "kl"))
        for name, value in (("DivergenceMask's low", low), ("DivergenceMask's high", high)):
            if divergence == "tv":
                check_range(name, value, above=0, at_most=1, reason="no total variation is above 1")
            else:
                check_range(name, value, above=0)
        self.low, self.high = low, high
        self.divergence: Divergence = divergence

    def keeps(self, terms: Terms) -> Tensor:
        return within_divergence(
            terms.logprobs.policy,
            terms.batch.behaviour_logprobs,
            terms.advantages,
            self.low,
            self.high,
            self.divergence,
        )


@final
class EntropyBand(MaskGate):
    """Stops tokens with ``|log ρ| > base + slope · H``, where H is the entropy of π_θ at the token (ESTR).

    Where the policy is certain, a small change of ρ is noise; where it is uncertain, larger changes are exploration.
    """

    def __init__(self, base: float = 0.05, slope: float = 0.3) -> None:
        """
        Args:
            base: Half-width of the band of log-ratios for a token without entropy.
            slope: Increase of the half-width for each nat of entropy.
        """
        check_range("base", base, above=0, reason="otherwise no token without entropy would train")
        check_range("slope", slope, at_least=0, below=math.inf)
        self.base, self.slope = base, slope

    def keeps(self, terms: Terms) -> Tensor:
        return within_entropy_band(terms.log_ratio, terms.logprobs.entropy, self.base, self.slope)

    def outside_band(self, terms: Terms) -> Tensor:
        return ~self.keeps(terms)


@final
class SuffixVeto(NestedGate):
    """Stops the tokens of a completion with negative advantage after the first with ``π_θ/π_α < threshold`` (μ-GRPO).

    The policy hardly ever reaches such a prefix any more, so what it would learn from the rest is unreliable. Another
    gate decides about the other tokens.
    """

    needs_behaviour = True

    def __init__(self, gate: Gate = MinClip(1.0, 4.0), threshold: float = 1e-4) -> None:  # noqa: B008
        """
        Args:
            gate: Gate of the other tokens.
            threshold: Ratio of a token below which the tokens after it stop training, between 0 and 1.
        """
        super().__init__(gate)
        check_range("threshold", threshold, above=0, below=1, reason="a ratio of 1 must not stop anything")
        self.threshold = threshold

    def __call__(self, terms: Terms) -> Gated:
        gated = self.gate(terms)
        with torch.no_grad():
            log_ratio = terms.logprobs.policy - terms.batch.behaviour_logprobs
            ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
            follows = follows_trigger(ratio, terms.batch.completion_mask, self.threshold)
            stopped = (terms.advantages < 0) & follows
        gated.surrogate = torch.where(stopped, 0.0, gated.surrogate)
        gated.clipped_low = gated.clipped_low | stopped
        return gated


@final
class TrustRegionMask(NestedGate):
    """Stops a whole completion if one of its tokens is too far from α: ``max_t D_t > threshold`` (TRM).

    D_t estimates KL(α ‖ π) at token t from the sampled token alone: its binary KL
    ``α log α/π + (1 - α) log (1 - α)/(1 - π)``, ``k2 = (log π/α)² / 2`` or ``k3 = π/α - 1 - log π/α``. Another gate
    decides about the other completions.
    """

    needs_behaviour = True

    def __init__(
        self,
        gate: Gate = NoGate(),  # noqa: B008
        threshold: float = 2.5,
        statistic: Literal["kl", "k2", "k3"] = "k2",
    ) -> None:
        """
        Args:
            gate: Gate of the other completions.
            threshold: Largest distance of a token, above 0.
            statistic: Distance of a token: ``kl`` (binary KL), ``k2`` (the same for ρ and 1/ρ) or ``k3``.
        """
        super().__init__(gate)
        check_range("threshold", threshold, above=0, reason="otherwise no completion whose ratio is not 1 would train")
        check_choice("statistic", statistic, ("kl", "k2", "k3"))
        self.threshold = threshold
        self.statistic: Literal["kl", "k2", "k3"] = statistic

    def __call__(self, terms: Terms) -> Gated:
        gated = self.gate(terms)
        with torch.no_grad():
            distance = token_divergence(terms.logprobs.policy, terms.batch.behaviour_logprobs, self.statistic)
            stopped = sequence_max(distance, terms.batch.completion_mask) > self.threshold
            below = terms.log_ratio < 0
        gated.surrogate = torch.where(stopped, 0.0, gated.surrogate)
        gated.clipped_low = gated.clipped_low | (stopped & below)
        gated.clipped_high = gated.clipped_high | (stopped & ~below)
        return gated
