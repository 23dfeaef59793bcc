"""Gates that hold the entropy by the covariance of advantage and log-probability (Cui et al., arXiv 2505.22617)."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from lgrpo.checks import check_range
from lgrpo.functional import stream_uniform, threshold_of_smallest, token_covariance
from lgrpo.losses.base import Gather
from lgrpo.losses.clips import MinClip
from lgrpo.losses.gates import Gate, Gated, NestedGate, innermost, step_of
from lgrpo.losses.terms import Terms
from lgrpo.losses.trust_regions import EntropyBand

ROUNDING = 1e-4
"""Log-ratios that may be due to rounding alone: their sign would decide the gradient of their absolute value."""


@dataclass(slots=True)
class _Survey:
    """Statistics of all tokens of an optimizer step."""

    mean_advantage: Tensor
    mean_logprob: Tensor
    num_tokens: int
    threshold: float = math.inf

    def covariance(self, terms: Terms) -> Tensor:
        """Return the covariance of each token, [B, T]."""
        policy = terms.logprobs.policy.detach()
        return token_covariance(terms.advantages, policy, self.mean_advantage, self.mean_logprob)


class _CovarianceGate(NestedGate):
    """Gate that selects a fraction of an optimizer step's tokens by their covariance.

    The statistics are over the optimizer step, all micro-batches and ranks. A batch that was not part of a survey is
    taken for the whole step.
    """

    def __init__(self, gate: Gate, fraction: float) -> None:
        super().__init__(gate)
        check_range("fraction", fraction, above=0, at_most=1)
        self.fraction = fraction
        self.surveys_step = True
        self._surveyed: tuple[int, int] | None = None
        self._survey: _Survey | None = None

    def survey(self, parts: Sequence[Terms], gather: Gather) -> None:
        super().survey(parts, gather)
        with torch.no_grad():
            self._survey = self._measure(parts, gather)
        self._surveyed = step_of(parts[0])

    def _selected(self, terms: Terms) -> Tensor:
        """Return the selected tokens, [B, T] bool."""
        with torch.no_grad():
            survey = self._survey if self._surveyed == step_of(terms) else None
            survey = survey or self._measure([terms], lambda own: own)
            return self._scores(terms, survey) < survey.threshold

    def _measure(self, parts: Sequence[Terms], gather: Gather) -> _Survey:
        def joined(values: list[Tensor]) -> Tensor:
            return gather(torch.cat(values))

        advantages = joined([part.advantages[part.batch.loss_mask] for part in parts])
        logprobs = joined([part.logprobs.policy.detach()[part.batch.loss_mask] for part in parts])
        survey = _Survey(advantages.double().mean(), logprobs.double().mean(), len(logprobs))
        scores = joined([self._scores(part, survey)[part.batch.loss_mask] for part in parts])
        count = max(1, int(self.fraction * survey.num_tokens))
        survey.threshold = threshold_of_smallest(scores[scores < math.inf], count)
        return survey

    @abstractmethod
    def _scores(self, terms: Terms, survey: _Survey) -> Tensor:
        """Return scores [B, T]; tokens with the smallest ones are selected, those with an infinite one never."""


@final
class CovariancePenalty(_CovarianceGate):
    """``-coef · |log ρ|`` added to the surrogate of the tokens with the largest covariance (KL-Cov).

    Another gate determines the surrogate; the default is ρA, without a clip. Log-ratios within ±1e-4 are not
    penalised. A step without advantages is skipped.
    """

    def __init__(
        self,
        gate: Gate = MinClip(1.0, math.inf),  # noqa: B008
        fraction: float = 2e-4,
        coef: float = 0.1,
    ) -> None:
        """
        Args:
            gate: Gate of all tokens.
            fraction: Share of the optimizer step's tokens that are penalised, at least one.
            coef: Weight of the penalty.
        """
        super().__init__(gate, fraction)
        check_range("coef", coef, above=0, below=math.inf)
        self.coef = coef
        self.reads_ratio = True

    def _scores(self, terms: Terms, survey: _Survey) -> Tensor:
        return -survey.covariance(terms)

    def __call__(self, terms: Terms) -> Gated:
        gated = self.gate(terms)
        penalised = self._selected(terms) & (terms.log_ratio.detach().abs() > ROUNDING)
        gated.surrogate = gated.surrogate - torch.where(penalised, self.coef * terms.log_ratio.abs(), 0.0)
        return gated


@final
class CovarianceClip(_CovarianceGate):
    """Stops random tokens whose covariance is inside a band (Clip-Cov). Another gate decides about the others.

    Which tokens are drawn depends on the prompt's position, the sibling and the index of the token only.
    """

    def __init__(
        self,
        gate: Gate = MinClip(),  # noqa: B008
        fraction: float = 2e-4,
        low: float = 1.0,
        high: float = 5.0,
    ) -> None:
        """
        Args:
            gate: Gate of the other tokens. Tokens that it stops are not drawn.
            fraction: Share of the optimizer step's tokens that are stopped, at least one.
            low: Covariance above which a token may be drawn.
            high: Covariance below which a token may be drawn.
        """
        super().__init__(gate, fraction)
        if isinstance(innermost(gate), EntropyBand):
            raise ValueError("CovarianceClip around EntropyBand: the entropies are not known when tokens are drawn")
        check_range("high", high, above=low, reason="the lower edge of the band")
        self.low, self.high = low, high

    def _scores(self, terms: Terms, survey: _Survey) -> Tensor:
        covariance, gated, batch = survey.covariance(terms), self.gate(terms), terms.batch
        inside = (covariance > self.low) & (covariance < self.high) & ~gated.clipped_low & ~gated.clipped_high
        sibling = (batch.rows % batch.group_size)[:, None]
        key = batch.positions[:, None], sibling, batch.completion_mask.cumsum(1), terms.logprobs.step
        return torch.where(inside, stream_uniform(batch.rollout, *key), math.inf)

    def __call__(self, terms: Terms) -> Gated:
        gated, stopped = self.gate(terms), self._selected(terms)
        with torch.no_grad():
            below = terms.log_ratio < 0
        gated.surrogate = torch.where(stopped, 0.0, gated.surrogate)
        gated.clipped_low = gated.clipped_low | (stopped & below)
        gated.clipped_high = gated.clipped_high | (stopped & ~below)
        return gated
