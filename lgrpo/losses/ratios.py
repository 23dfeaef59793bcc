"""ρ: the policy over another, of a token or of a whole completion."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, final

from torch import Tensor

from lgrpo.functional import RatioDenominator, log_ratio, sequence_log_ratio
from lgrpo.losses.base import PolicyLogprobs
from lgrpo.losses.terms import check_choice
from lgrpo.types import RolloutBatch


class Ratio(ABC):
    """How likely what was sampled is now, beside how likely it was under another policy."""

    def __init__(self, over: RatioDenominator = "behaviour") -> None:
        """
        Args:
            over: What π_θ is divided by: ``behaviour`` (π_α), ``proximal`` (π_k), or ``none`` (itself: always 1).
        """
        check_choice("over", over, ("behaviour", "proximal", "none"))
        self.over: RatioDenominator = over

    @abstractmethod
    def __call__(self, batch: RolloutBatch, logprobs: PolicyLogprobs) -> Tensor:
        """log ρ [B, T], with gradient."""


@final
class TokenRatio(Ratio):
    """Each token's own."""

    def __call__(self, batch: RolloutBatch, logprobs: PolicyLogprobs) -> Tensor:
        return log_ratio(logprobs.policy, batch.behaviour_logprobs, logprobs.proximal, self.over)


@final
class SequenceRatio(Ratio):
    """One for a whole completion, at each of its tokens."""

    def __init__(self, over: RatioDenominator = "behaviour", mean: Literal["geometric", "product"] = "geometric"):
        """
        Args:
            over: What π_θ is divided by: ``behaviour`` (π_α), ``proximal`` (π_k), or ``none`` (itself: always 1).
            mean: ``geometric``, the length's root of the completion's ratio (GSPO), or the ``product`` itself.
        """
        super().__init__(over)
        check_choice("mean", mean, ("geometric", "product"))
        self.mean = mean

    def __call__(self, batch: RolloutBatch, logprobs: PolicyLogprobs) -> Tensor:
        tokens = log_ratio(logprobs.policy, batch.behaviour_logprobs, logprobs.proximal, self.over)
        return sequence_log_ratio(tokens, batch.completion_mask, self.mean == "geometric")
