"""Divergences of the policy from the behaviour policy, from ratios of whole completions."""

from __future__ import annotations

import torch
from torch import Tensor

from lgrpo.functional.surrogate import MAX_LOG_RATIO


def completion_log_ratio(log_ratio: Tensor, completion_mask: Tensor) -> Tensor:
    """Return log π(y)/α(y) of each completion, [B] float64: the sum over its tokens, limited to ±20.

    >>> completion_log_ratio(torch.tensor([[9.0, 0.5, -0.25]]), torch.tensor([[False, True, True]]))
    tensor([0.2500], dtype=torch.float64)
    """
    total = torch.where(completion_mask, log_ratio.double(), 0.0).sum(1)
    return total.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def k3_of_ratio(log_ratio: Tensor) -> Tensor:
    """Return ``ρ - 1 - log ρ``, which is never negative; its mean over samples of α estimates KL(α ‖ π).

    >>> k3_of_ratio(torch.tensor([0.0, 0.5, -0.5]))
    tensor([0.0000, 0.1487, 0.1065])
    """
    return torch.expm1(log_ratio) - log_ratio


def pinsker(kl: Tensor) -> Tensor:
    """Return the upper bound of the total variation for a KL divergence: ``√(KL / 2)``.

    >>> pinsker(torch.tensor([0.0, 0.02]))
    tensor([0.0000, 0.1000])
    """
    return (kl.clamp(min=0) / 2).sqrt()


def total_variation(log_ratio: Tensor) -> Tensor:
    """Return ``½ |ρ - 1|``; its mean over samples of α estimates TV(π, α), half the L1 distance.

    >>> total_variation(torch.tensor([1.2, 0.8]).log())
    tensor([0.1000, 0.1000])
    """
    return torch.expm1(log_ratio).abs() / 2


def effective_sample_size(log_ratio: Tensor) -> Tensor:
    """Return ``(Σ ρ)² / (n Σ ρ²)``: the fraction of the n samples of α that counts as samples of π; 1 if π is α.

    >>> effective_sample_size(torch.zeros(4)), effective_sample_size(torch.tensor([0.0, 0.0, 9.0, 0.0]))
    (tensor(1.), tensor(0.2502))
    """
    return torch.exp(2 * log_ratio.logsumexp(0) - (2 * log_ratio).logsumexp(0)) / len(log_ratio)


def chi_squared(log_ratio: Tensor) -> Tensor:
    """Return ``(ρ - 1)²``; its mean over samples of α estimates χ²(π ‖ α), the variance of the ratio.

    >>> chi_squared(torch.tensor([1.2, 0.8]).log())
    tensor([0.0400, 0.0400])
    """
    return torch.expm1(log_ratio).square()
