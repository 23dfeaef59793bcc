"""Terms added to the loss of each live token, whether its gate stops it or not."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Literal, final

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lgrpo.checks import check_range
from lgrpo.functional import MAX_LOG_RATIO, k3_hinge, kl_divergence
from lgrpo.losses.terms import Terms, check_choice
from lgrpo.teachers import Distillation

ESTIMATORS = ("k1", "k2", "k3", "k3_corrected")
"""Estimators of the divergence from the reference."""


class Regulariser(ABC):
    """Penalty on each token."""

    needs_reference = False
    """Whether a reference policy must be kept."""
    needs_entropy_gradient = False
    """Whether the entropy must carry a gradient."""
    needs_behaviour = False
    """Whether log π_α is read."""
    needs_zero_variance = False
    """Whether it acts on groups whose rewards are all equal, which must not be masked then."""
    distillation: Distillation | None = None
    """Teacher whose divergence from the policy it reads."""

    def __init__(self, coef: float = 0.1) -> None:
        """
        Args:
            coef: Weight λ.
        """
        check_range(f"{type(self).__name__}'s coef", coef, above=0, below=math.inf, reason="remove the part instead")
        self.coef = coef

    @abstractmethod
    def __call__(self, terms: Terms) -> Tensor:
        """Return the penalty [B, T], with gradient, to be minimised."""


@final
class ReferenceKL(Regulariser):
    """``coef · KL(π_θ ‖ π_ref)``."""

    needs_reference = True

    def __init__(self, coef: float = 0.01, estimator: Literal["k1", "k2", "k3", "k3_corrected"] = "k3") -> None:
        """
        Args:
            coef: Weight β.
            estimator: Estimator of the divergence; ``k3_corrected`` is k3 times π_θ/π_α, which is at most e^20, and
                unbiased for samples of π_α as far as this cap is not reached.
        """
        super().__init__(coef)
        check_choice("estimator", estimator, ESTIMATORS)
        if estimator == "k1":
            rank_zero_warn(
                "k1 as a loss does not hold the policy near the reference: on-policy the expectation of its gradient, "
                "of ∇log π_θ, is 0. Use k2 or k3"
            )
        self.estimator = estimator
        self.needs_behaviour = estimator == "k3_corrected"

    def __call__(self, terms: Terms) -> Tensor:
        policy, reference = terms.logprobs.policy, terms.logprobs.reference
        if reference is None:
            raise ValueError("ReferenceKL needs a reference, but there are no reference log-probabilities")
        if self.estimator == "k3_corrected":
            ratio = (policy - terms.batch.behaviour_logprobs).clamp(max=MAX_LOG_RATIO).exp()
            return self.coef * ratio * kl_divergence(policy, reference, "k3")
        return self.coef * kl_divergence(policy, reference, self.estimator)


@final
class BehaviourK2(Regulariser):
    """``coef · (log π_θ - log π_α)²`` (OPMD as in Kimi), twice the k2 estimator: stay near the behaviour policy."""

    needs_behaviour = True

    def __call__(self, terms: Terms) -> Tensor:
        return self.coef * (terms.logprobs.policy - terms.batch.behaviour_logprobs).square()


@final
class MasteredHinge(Regulariser):
    """``coef · max(k3(d) - k3(±width), 0)``, d = log π_θ/π_α, for groups in which every completion is correct (MCPO).

    Their advantages are 0, so nothing else holds the policy there. Up to ``width`` it may move freely.
    """

    needs_behaviour = True
    needs_zero_variance = True

    def __init__(self, coef: float = 1.0, width: float = 0.01, success_reward: float = 1.0) -> None:
        """
        Args:
            coef: Weight β.
            width: Largest |d| without penalty.
            success_reward: Lowest reward of a correct completion.
        """
        super().__init__(coef)
        check_range("MasteredHinge's width", width, at_least=0, below=MAX_LOG_RATIO)
        self.width = width
        self.success_reward = success_reward

    def __call__(self, terms: Terms) -> Tensor:
        mastered = terms.zero_variance & (terms.batch.rewards >= self.success_reward)
        log_ratio = (terms.logprobs.policy - terms.batch.behaviour_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return self.coef * torch.where(mastered[:, None], k3_hinge(log_ratio, self.width), 0.0)


@final
class BehaviourForwardKL(Regulariser):
    """``-coef · log π_θ`` (AsymRE): KL(π_α ‖ π_θ) up to a constant; equal to adding ``coef`` to every advantage."""

    def __call__(self, terms: Terms) -> Tensor:
        return -self.coef * terms.logprobs.policy


@final
class EntropyBonus(Regulariser):
    """``-coef · H(π_θ)`` at each token: keeps the entropy of the policy high."""

    needs_entropy_gradient = True

    def __init__(self, coef: float = 0.001) -> None:
        """
        Args:
            coef: Weight of the entropy.
        """
        super().__init__(coef)

    def __call__(self, terms: Terms) -> Tensor:
        return -self.coef * terms.logprobs.entropy
