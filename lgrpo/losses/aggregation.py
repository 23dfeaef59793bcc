"""Aggregations: from the losses of tokens to a scalar."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, final

from torch import Tensor

from lgrpo.checks import check_range
from lgrpo.functional import constant_sum, sequence_mean, sequence_sum, token_mean
from lgrpo.losses.terms import check_choice
from lgrpo.types import RolloutBatch


class Aggregation(ABC):
    """Maps losses [B, T] of a micro-batch to its part of the loss of the optimizer step."""

    @abstractmethod
    def __call__(self, values: Tensor, batch: RolloutBatch) -> Tensor:
        """Return a scalar; only tokens of ``batch.loss_mask`` count in the sum."""


class _Mean(Aggregation):
    """Sum of the live tokens' losses, divided by a number of tokens or sequences."""

    def __init__(self, over: Literal["all", "live"] = "all") -> None:
        """
        Args:
            over: Tokens to divide by: ``all`` sampled ones, masked groups included, or only the ``live`` ones.
        """
        check_choice("over", over, ("all", "live"))
        self.over = over


@final
class TokenMean(_Mean):
    """Mean over the tokens of the whole optimizer step."""

    def __call__(self, values: Tensor, batch: RolloutBatch) -> Tensor:
        totals = batch.totals
        return token_mean(values, batch.loss_mask, totals.all_tokens if self.over == "all" else totals.live_tokens)


@final
class SequenceMean(_Mean):
    """Mean over a sequence's tokens, then mean over the sequences of the whole optimizer step."""

    def __call__(self, values: Tensor, batch: RolloutBatch) -> Tensor:
        if self.over == "all":
            lengths, num_sequences = batch.completion_mask.sum(1), batch.totals.all_sequences
        else:
            lengths, num_sequences = batch.loss_mask.sum(1), batch.totals.live_sequences
        return sequence_mean(values, batch.loss_mask, lengths, num_sequences)


@final
class SequenceSum(_Mean):
    """Sum over a sequence's tokens, then mean over the sequences of the whole optimizer step (LUSPO).

    A sequence counts in proportion to its length. With ``SequenceRatio`` and ``SequenceMean`` (GSPO) all sequences
    count the same, so that each token of a long one counts less.
    """

    def __call__(self, values: Tensor, batch: RolloutBatch) -> Tensor:
        totals = batch.totals
        num_sequences = totals.all_sequences if self.over == "all" else totals.live_sequences
        return sequence_sum(values, batch.loss_mask, num_sequences)


@final
class ConstantSum(Aggregation):
    """Sum over tokens, divided by a constant that does not depend on the samples (Dr. GRPO)."""

    def __init__(self, constant: float | None = None) -> None:
        """
        Args:
            constant: Divisor; the default is the completions in an optimizer step times the longest allowed length.
        """
        check_range("constant", constant, above=0)
        self.constant = constant

    def __call__(self, values: Tensor, batch: RolloutBatch) -> Tensor:
        constant = self.constant or batch.totals.all_sequences * batch.max_tokens
        return constant_sum(values, batch.loss_mask, constant)
