"""How the losses of tokens become one number, and what it is divided by."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, final

from torch import Tensor

from lgrpo.functional import constant_sum, sequence_mean, token_mean
from lgrpo.losses.terms import check_choice
from lgrpo.types import RolloutBatch

Over = Literal["all", "live"]


class Aggregation(ABC):
    """From [B, T] to a scalar: this micro-batch's share of the optimizer step."""

    @abstractmethod
    def __call__(self, values: Tensor, batch: RolloutBatch) -> Tensor:
        """Only tokens of ``batch.loss_mask`` count in the sum."""


@final
class TokenMean(Aggregation):
    """The mean over the tokens of the whole optimizer step."""

    def __init__(self, over: Over = "all") -> None:
        """
        Args:
            over: Divide by all sampled tokens, masked groups included, or only by the live ones.
        """
        check_choice("over", over, ("all", "live"))
        self.over = over

    def __call__(self, values: Tensor, batch: RolloutBatch) -> Tensor:
        totals = batch.totals
        return token_mean(values, batch.loss_mask, totals.all_tokens if self.over == "all" else totals.live_tokens)


@final
class SequenceMean(Aggregation):
    """The mean over a sequence's tokens, then the mean over the sequences of the whole optimizer step."""

    def __init__(self, over: Over = "all") -> None:
        """
        Args:
            over: Count all sampled tokens and sequences, or only the live ones.
        """
        check_choice("over", over, ("all", "live"))
        self.over = over

    def __call__(self, values: Tensor, batch: RolloutBatch) -> Tensor:
        if self.over == "all":
            lengths, num_sequences = batch.completion_mask.sum(1), batch.totals.all_sequences
        else:
            lengths, num_sequences = batch.loss_mask.sum(1), batch.totals.live_sequences
        return sequence_mean(values, batch.loss_mask, lengths, num_sequences)


@final
class ConstantSum(Aggregation):
    """The sum over tokens, over a constant that does not depend on what was sampled (Dr. GRPO)."""

    def __init__(self, constant: float | None = None) -> None:
        """
        Args:
            constant: By default the completions in an optimizer step times the longest completion allowed.
        """
        if constant is not None and not constant > 0:
            raise ValueError(f"constant is {constant}; a sum can only be divided by a positive number")
        self.constant = constant

    def __call__(self, values: Tensor, batch: RolloutBatch) -> Tensor:
        constant = self.constant or batch.totals.all_sequences * batch.max_tokens
        return constant_sum(values, batch.loss_mask, constant)
