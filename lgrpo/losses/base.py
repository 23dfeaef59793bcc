"""Base class of policy losses: a rollout and log-probabilities in, a scalar and diagnostics out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from lgrpo.functional import kl_divergence
from lgrpo.teachers import Distillation
from lgrpo.types import RolloutBatch, StepTotals

Gather: TypeAlias = Callable[[Tensor], Tensor]
"""Function that joins the vectors of all ranks."""


@dataclass(kw_only=True, slots=True)
class PolicyLogprobs:
    """Log-probabilities [B, T] of a batch's tokens under the trainer's policies; 0 outside the completions."""

    policy: Tensor
    """log π_θ, with gradient."""
    entropy: Tensor
    """Entropy of π_θ at each token, with gradient if the loss needs it."""
    proximal: Tensor | None = None
    """log π_k: the policy at the start of this rollout's updates."""
    reference: Tensor | None = None
    """log π_ref."""
    teacher_kl: Tensor | None = None
    """Divergence from the teacher at each token, with gradient."""
    step: int = 0
    """Optimizer steps of π_θ so far: the lag of a token is counted from it."""


@dataclass(kw_only=True, slots=True)
class LossOutput:
    """Part of the optimizer step's loss of a micro-batch, and diagnostics of its tokens."""

    loss: Tensor
    ratio: Tensor
    """[B, T] detached."""
    clipped_low: Tensor
    """[B, T] bool: no gradient, because the ratio left the band downwards."""
    clipped_high: Tensor
    """[B, T] bool: likewise upwards."""
    outside_band: Tensor | None = None
    """[B, T] bool: ratio outside the band, with gradient or not; None if the loss has no band."""

    def quantities(self, batch: RolloutBatch, logprobs: PolicyLogprobs) -> dict[str, Any]:
        """Return the arguments of ``StepMetrics.update`` for this micro-batch."""
        policy, reference = logprobs.policy.detach(), logprobs.reference
        return {
            "loss": self.loss,
            "mask": batch.loss_mask,
            "sampled": batch.completion_mask,
            "log_ratio": policy - batch.behaviour_logprobs,
            "ratio": self.ratio,
            "clipped_low": self.clipped_low,
            "clipped_high": self.clipped_high,
            "outside_band": self.outside_band,
            "entropy": logprobs.entropy.detach(),
            "kl_reference": None if reference is None else kl_divergence(policy, reference),
            "kl_teacher": None if logprobs.teacher_kl is None else logprobs.teacher_kl.detach(),
            "lag": batch.lag(logprobs.step) if batch.behaviour_step.ndim == 1 else batch.token_lag(logprobs.step),
            "behaviour_known": ~batch.behaviour_logprobs.isnan(),
        }


class PolicyLoss(ABC):
    """Scalar that an optimizer step minimises.

    The losses of a step's micro-batches **add up** to the loss of the step: each divides by ``batch.totals``, never by
    a count of the micro-batch.
    """

    @property
    @abstractmethod
    def needs_reference(self) -> bool:
        """Whether a reference policy must be kept."""

    @property
    @abstractmethod
    def needs_proximal(self) -> bool:
        """Whether log π_k must be kept from the first pass over a rollout."""

    @property
    def needs_behaviour(self) -> bool:
        """Whether log π_α is read. A loss that does not read it can train on data that has none."""
        return True

    @property
    def needs_entropy_gradient(self) -> bool:
        """Whether the entropy must carry a gradient, which costs memory."""
        return False

    @property
    def vanishes_without_advantages(self) -> bool:
        """Whether the gradient is 0 if all advantages are 0, so that the step can be skipped."""
        return False

    @property
    def needs_zero_variance(self) -> bool:
        """Whether a part acts on groups whose rewards are all equal, which must not be masked then."""
        return False

    @property
    def distillation(self) -> Distillation | None:
        """Teacher whose divergence from the policy must be computed at each token; None if there is none."""
        return None

    @property
    def surveys_step(self) -> bool:
        """Whether ``survey`` must be called, which costs one more pass without gradient for each optimizer step."""
        return False

    def survey(self, parts: Iterable[tuple[RolloutBatch, PolicyLogprobs]], gather: Gather) -> None:  # noqa: B027
        """See all tokens of an optimizer step before its first micro-batch.

        Args:
            parts: This rank's micro-batches, and log-probabilities of their tokens without gradient or entropy.
            gather: Function that joins a vector of every rank, of any length, to one. All ranks must call it.
        """

    def has_gradient(self, totals: StepTotals) -> bool:
        """Return whether an optimizer step has anything to train on."""
        return totals.live_tokens > 0 and (totals.signal_tokens > 0 or not self.vanishes_without_advantages)

    @abstractmethod
    def __call__(self, batch: RolloutBatch, logprobs: PolicyLogprobs) -> LossOutput:
        """Return the loss of a micro-batch."""
