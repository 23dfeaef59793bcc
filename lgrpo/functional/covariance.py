"""Covariance of advantage and log-probability at single tokens, which decides how the entropy changes."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def token_covariance(
    advantages: Tensor, logprobs: Tensor, mean_advantage: float | Tensor, mean_logprob: float | Tensor
) -> Tensor:
    """Return ``(A - Ā)(log π - mean log π)`` of each token, whose mean is the covariance.

    Where it is large, a likely token is reinforced, and the entropy falls.

    >>> token_covariance(torch.tensor([1.0, -1.0]), torch.tensor([-0.5, -1.5]), 0.0, -1.0)
    tensor([0.5000, 0.5000])
    """
    return (advantages - mean_advantage) * (logprobs - mean_logprob)


def threshold_of_smallest(values: Tensor, count: int) -> float:
    """Return a threshold with ``count`` of the values [n] below it; infinite if there are no more.

    It lies half-way between two values, so that rounding does not decide. More are below it if some are equal.

    >>> threshold_of_smallest(torch.tensor([4.0, 1.0, 2.0]), 2), threshold_of_smallest(torch.tensor([4.0]), 2)
    (3.0, inf)
    """
    if count >= len(values):
        return math.inf
    smallest = torch.topk(values.double(), count + 1, largest=False).values
    last, following = smallest[-2:].tolist()
    return (last + following) / 2 if following > last else last + 1e-6 * max(abs(last), 1e-6)
