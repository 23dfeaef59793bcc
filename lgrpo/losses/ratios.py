"""Ratios ρ of the policy over another policy, of a token or of a whole completion."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, final

from torch import Tensor

from lgrpo.functional import RatioDenominator, log_ratio, sequence_log_ratio
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

    @abstractmethod
    def __call__(self, batch: RolloutBatch, logprobs: PolicyLogprobs) -> Tensor:
        """Return log ρ [B, T], with gradient."""


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
