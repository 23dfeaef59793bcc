"""Policy loss made of parts: ratio, gate, weight, regularisers, aggregation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from lgrpo.checks import check_range
from lgrpo.functional import MAX_LOG_RATIO
from lgrpo.losses.aggregation import Aggregation, TokenMean
from lgrpo.losses.base import Gather, LossOutput, PolicyLogprobs, PolicyLoss
from lgrpo.losses.clips import GeometricClip, MinClip
from lgrpo.losses.gates import Gate, NoGate, innermost
from lgrpo.losses.ratios import Ratio, SequenceRatio, TokenRatio
from lgrpo.losses.regularisers import Regulariser
from lgrpo.losses.terms import Terms
from lgrpo.losses.weights import NoWeight, Weight
from lgrpo.teachers import Distillation
from lgrpo.types import RolloutBatch


class ComposedLoss(PolicyLoss):
    """``-scale · weight · gate(A, ρ) + regularisers`` for each token, aggregated over the optimizer step."""

    def __init__(
        self,
        ratio: Ratio = TokenRatio(),  # noqa: B008
        gate: Gate = NoGate(),  # noqa: B008
        weight: Weight = NoWeight(),  # noqa: B008
        regularisers: list[Regulariser] | None = None,
        aggregation: Aggregation = TokenMean(),  # noqa: B008
        scale: float = 1.0,
    ) -> None:
        """
        Args:
            ratio: Ratio ρ of a token or of a whole completion.
            gate: Gate that stops tokens from training by their ratio; the default stops none.
            weight: Weight of each token; the default is 1.
            regularisers: Terms added to every live token, whether its gate stops it or not.
            aggregation: Aggregation of tokens to a scalar.
            scale: Factor of the surrogate, without the regularisers. At 0 these alone are trained on.
        """
        check_parts(ratio, gate, weight)
        if regularisers:
            check_range("scale", scale, at_least=0)
        else:
            check_range("scale", scale, above=0, reason="without regularisers there is nothing else to train on")
        if len(_distillations(regularisers)) > 1:
            raise ValueError("a loss has at most one TeacherKL")
        self.ratio = ratio
        self.gate = gate
        self.weight = weight
        self.regularisers = regularisers or []
        self.aggregation = aggregation
        self.scale = scale

    @property
    def needs_reference(self) -> bool:
        return any(part.needs_reference for part in self.regularisers)

    @property
    def needs_proximal(self) -> bool:
        reads_proximal = self.ratio.over == "proximal" or self.gate.needs_proximal or self._reads_mismatch
        return reads_proximal and not self.ratio.approximates_proximal

    @property
    def needs_behaviour(self) -> bool:
        reads_ratio = self.gate.reads_ratio or self.weight.is_ratio
        return (
            (self.ratio.over == "behaviour" and reads_ratio)
            or self.ratio.approximates_proximal
            or self.gate.needs_behaviour
            or self._reads_mismatch
            or any(part.needs_behaviour for part in self.regularisers)
        )

    @property
    def _reads_mismatch(self) -> bool:
        return self.weight.corrects_mismatch or self.weight.reads_mismatch

    @property
    def needs_entropy_gradient(self) -> bool:
        return any(part.needs_entropy_gradient for part in self.regularisers)

    @property
    def vanishes_without_advantages(self) -> bool:
        """Whether there are no regularisers: the surrogate of every gate is a multiple of the advantage."""
        return not self.regularisers

    @property
    def needs_zero_variance(self) -> bool:
        return self.weight.needs_zero_variance or any(part.needs_zero_variance for part in self.regularisers)

    @property
    def distillation(self) -> Distillation | None:
        return next(iter(_distillations(self.regularisers)), None)

    @property
    def surveys_step(self) -> bool:
        return self.gate.surveys_step

    def survey(self, parts: Iterable[tuple[RolloutBatch, PolicyLogprobs]], gather: Gather) -> None:
        self.gate.survey([self._terms(batch, logprobs) for batch, logprobs in parts], gather)

    def _terms(self, batch: RolloutBatch, logprobs: PolicyLogprobs) -> Terms:
        logprobs = replace(logprobs, proximal=self.ratio.proximal(batch, logprobs))
        log_ratio = self.ratio(batch, logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return Terms(batch=batch, logprobs=logprobs, log_ratio=log_ratio)

    def __call__(self, batch: RolloutBatch, logprobs: PolicyLogprobs) -> LossOutput:
        terms = self._terms(batch, logprobs)
        gated = self.gate(terms)
        values = -self.scale * self.weight(terms).detach() * gated.surrogate
        for regulariser in self.regularisers:
            values = values + regulariser(terms)
        with torch.no_grad():
            outside_band = self.gate.outside_band(terms)
        return LossOutput(
            loss=self.aggregation(values, batch),
            ratio=terms.ratio.detach(),
            clipped_low=gated.clipped_low,
            clipped_high=gated.clipped_high,
            outside_band=outside_band,
        )


def _distillations(regularisers: list[Regulariser] | None) -> list[Distillation]:
    return [part.distillation for part in regularisers or [] if part.distillation is not None]


def check_parts(ratio: Ratio, gate: Gate, weight: Weight) -> None:
    """Raise a ``ValueError`` if the parts contradict each other."""
    gate = innermost(gate)
    names = f"{type(gate).__name__} and {type(weight).__name__}"
    if gate.multiplies_by_ratio and weight.is_ratio:
        raise ValueError(f"{names} both multiply by the ratio, so it would be squared: remove the weight")
    if weight.corrects_mismatch and gate.multiplies_by_ratio and ratio.over == "behaviour":
        raise ValueError(
            f"{type(weight).__name__} is π_k/π_α, and {type(gate).__name__} multiplies by a ratio over the behaviour "
            "policy, π_θ/π_α, which already contains that factor. Set the ratio's over to 'proximal' or 'none'"
        )
    centre = gate.centre if isinstance(gate, MinClip) else "one"
    if centre != "one" and (ratio.over != "behaviour" or isinstance(ratio, SequenceRatio)):
        raise ValueError(
            f"clip centre {centre!r} is the π_k/α of a token and requires its ratio over the behaviour policy; with "
            f"{type(ratio).__name__} over {ratio.over!r} use centre 'one'"
        )
    acts = gate.reads_ratio and type(gate) is not MinClip  # that is plain REINFORCE, as in TRL
    if ratio.over == "none" and (acts or weight.is_ratio):
        raise ValueError(
            f"the ratio is over 'none', so it is always 1 and {names} would have no effect: choose another"
        )
    if isinstance(gate, GeometricClip) and isinstance(ratio, SequenceRatio):
        raise ValueError("GeometricClip clips the ratio of each token: use TokenRatio with it")
