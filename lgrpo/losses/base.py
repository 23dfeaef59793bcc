"""What a policy loss is: a rollout and the log-probabilities of its tokens in, a scalar and its diagnostics out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from lgrpo.types import RolloutBatch


@dataclass(kw_only=True, slots=True)
class PolicyLogprobs:
    """log-probabilities [B, T] of a batch's tokens under the policies of the trainer; 0 outside the completions."""

    policy: Tensor
    """log π_θ, with gradient."""
    entropy: Tensor
    """Entropy of π_θ at each token, with gradient where the loss needs it."""
    proximal: Tensor | None = None
    """log π_k: the policy when this rollout's updates began."""
    reference: Tensor | None = None
    """log π_ref."""


@dataclass(kw_only=True, slots=True)
class LossOutput:
    """The loss of a micro-batch, in the share it has in its optimizer step, and per-token facts about it."""

    loss: Tensor
    ratio: Tensor
    """[B, T] detached."""
    clipped_low: Tensor
    """[B, T] bool: no gradient, because the ratio left the band downwards."""
    clipped_high: Tensor
    """[B, T] bool: likewise upwards."""


class PolicyLoss(ABC):
    """The scalar an optimizer step descends. Subclass it, or use one that is there.

    The losses of the micro-batches of a step **add up** to the loss of the step: each divides by ``batch.totals``,
    never by a count of its own.
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

    @abstractmethod
    def __call__(self, batch: RolloutBatch, logprobs: PolicyLogprobs) -> LossOutput:
        """Loss of this micro-batch."""
