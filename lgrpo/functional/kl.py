"""Estimators of KL(π_θ ‖ π_ref) from tokens sampled by π_θ, per token."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from lgrpo.functional.surrogate import MAX_LOG_RATIO

KLEstimator = Literal["k1", "k2", "k3"]


def kl_divergence(policy_logprobs: Tensor, reference_logprobs: Tensor, estimator: KLEstimator = "k3") -> Tensor:
    """Return, with d = log π_θ - log π_ref, ``k1 = d``, ``k2 = d²/2`` or ``k3 = e^{-d} + d - 1``.

    k1 and k3 are unbiased on-policy; k2 and k3 are never negative. In k3 d is at least -20, which matters for tokens of
    almost zero probability: beyond it k3 is constant, without gradient.

    >>> policy, reference = torch.tensor([-1.0, -1.0]), torch.tensor([-1.5, -1.0])
    >>> for name in ("k1", "k2", "k3"):
    ...     print(kl_divergence(policy, reference, name))
    tensor([0.5000, 0.0000])
    tensor([0.1250, 0.0000])
    tensor([0.1065, 0.0000])
    """
    d = policy_logprobs - reference_logprobs
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d.square() / 2
    if estimator == "k3":
        d = d.clamp(min=-MAX_LOG_RATIO)  # in both terms: the gradient must not change its sign
        return torch.exp(-d) + d - 1
    raise ValueError(f"KL estimator {estimator!r} is not one of k1, k2, k3")
