"""Ratios ρ of the policy over another policy, of a token or of a whole completion."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, final

from torch import Tensor

from lgrpo.functional import RatioDenominator, interpolated_logprobs, log_ratio, sequence_log_ratio
from lgrpo.losses.base import PolicyLogprobs
from lgrpo.losses.terms import check_choice
from lgrpo.types import RolloutBatch


class Ratio(ABC):
    """Probability of the sampled tokens under the policy, divided by that under another policy."""

    def __init__(self, over: RatioDenominator = "behaviour") -> None:
        """
        Args:
            over: Denominator: ``behaviour`` (π_α), ``proximal`` (π_k), or ``none`` (π_θ, always 1).
        """
        check_choice("over", over, ("behaviour", "proximal", "none"))
        self.over: RatioDenominator = over

    @property
    def approximates_proximal(self) -> bool:
        """Whether log π_k is computed from log π_θ and log π_α; otherwise it is kept from the first pass."""
        return False

    def proximal(self, batch: RolloutBatch, logprobs: PolicyLogprobs) -> Tensor | None:
        """Return log π_k [B, T] for all parts of the loss; None if it is not known."""
        return logprobs.proximal

    @abstractmethod
    def __call__(self, batch: RolloutBatch, logprobs: PolicyLogprobs) -> Tensor:
        """Return log ρ [B, T], with gradient. ``logprobs.proximal`` is what ``proximal`` returned."""


@final
class TokenRatio(Ratio):
    """Ratio of each token."""

    def __call__(self, batch: RolloutBatch, logprobs: PolicyLogprobs) -> Tensor:
        return log_ratio(logprobs.policy, batch.behaviour_logprobs, logprobs.proximal, self.over)


@final
class SequenceRatio(Ratio):
    """Ratio of a whole completion, at each of its tokens."""

    def __init__(self, over: RatioDenominator = "behaviour", mean: Literal["geometric", "product"] = "geometric"):
        """
        Args:
            over: Denominator: ``behaviour`` (π_α), ``proximal`` (π_k), or ``none`` (π_θ, always 1).
            mean: ``geometric`` mean of the tokens' ratios (GSPO), or their ``product``.
        """
        super().__init__(over)
        check_choice("mean", mean, ("geometric", "product"))
        self.mean = mean

    def __call__(self, batch: RolloutBatch, logprobs: PolicyLogprobs) -> Tensor:
        tokens = log_ratio(logprobs.policy, batch.behaviour_logprobs, logprobs.proximal, self.over)
        return sequence_log_ratio(tokens, batch.completion_mask, self.mean == "geometric")


@final
class InterpolatedRatio(Ratio):
    """Ratio of each token over an interpolated π_k: ``log π_k = log π_α / d + (1 - 1/d) log π_θ``, lag d (A-3PO).

    Its value is ``(π_θ/π_α)^(1/d)`` (d = 1 at lag 0), its gradient that of log π_θ. The weights that correct the
    mismatch use the same π_k. No log-probabilities of a first pass are kept. Recorded tokens have no lag: π_k is π_α.
    """

    def __init__(self) -> None:
        super().__init__("proximal")

    @property
    def approximates_proximal(self) -> bool:
        return True

    def proximal(self, batch: RolloutBatch, logprobs: PolicyLogprobs) -> Tensor:
        lag = batch.token_lag(logprobs.step).nan_to_num(0.0).to(logprobs.policy)
        return interpolated_logprobs(logprobs.policy, batch.behaviour_logprobs, lag)

    def __call__(self, batch: RolloutBatch, logprobs: PolicyLogprobs) -> Tensor:
        return log_ratio(logprobs.policy, batch.behaviour_logprobs, logprobs.proximal, self.over)
