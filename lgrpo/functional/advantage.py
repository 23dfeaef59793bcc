"""Advantages: rewards of whole groups in, one number for each completion out."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from lgrpo.checks import check_range


def grouped(rewards: Tensor, group_size: int) -> Tensor:
    """Reshape rewards [B] to [P, G].

    >>> grouped(torch.tensor([1.0, 0.0, 1.0, 1.0]), group_size=2)
    tensor([[1., 0.],
            [1., 1.]])
    """
    check_range("group_size", group_size, at_least=2, reason="completions are compared within their group")
    if rewards.ndim != 1 or rewards.shape[0] % group_size:
        raise ValueError(f"rewards of shape {tuple(rewards.shape)} are not whole groups of {group_size}")
    return rewards.view(-1, group_size)


def leave_one_out_mean(groups: Tensor) -> Tensor:
    """Return, for each of [P, G], the mean of its siblings without itself (RLOO).

    >>> leave_one_out_mean(torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
    tensor([[0.0000, 0.3333, 0.3333, 0.3333]])
    """
    return (groups.sum(1, keepdim=True) - groups) / (groups.shape[1] - 1)


def log_mean_exp(groups: Tensor, temperature: float = 1.0) -> Tensor:
    """Return ``τ log mean exp(r / τ)`` of each group [P, G], as [P, 1]: the soft maximum of OPMD.

    >>> log_mean_exp(torch.tensor([[1.0, 0.0]]))
    tensor([[0.6201]])
    """
    log_size = math.log(groups.shape[1])
    return temperature * (torch.logsumexp(groups / temperature, 1, keepdim=True) - log_size)


def group_std(
    groups: Tensor, eps: float = 1e-4, eps_placement: Literal["inside", "outside"] = "inside", unbiased: bool = False
) -> Tensor:
    """Return the standard deviation of each group [P, G], as [P, 1], kept above 0 by ``eps``.

    ``eps`` is added to the variance, inside the root (Mroueh et al.), or to the standard deviation, outside it (TRL,
    with ``unbiased=True``).

    >>> groups = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    >>> group_std(groups), group_std(groups, eps_placement="outside", unbiased=True)
    (tensor([[0.4331]]), tensor([[0.5001]]))
    """
    variance = groups.var(1, keepdim=True, correction=int(unbiased))
    if eps_placement == "inside":
        return (variance + eps).sqrt()
    if eps_placement == "outside":
        return variance.sqrt() + eps
    raise ValueError(f"eps_placement is {eps_placement!r}; it is 'inside' or 'outside' of the root")


def bernoulli_std(groups: Tensor, smoothing: float = 1.0) -> Tensor:
    """Return ``√(p (1 - p))`` of each group [P, G] of rewards in [0, 1], as [P, 1], with p smoothed towards ½.

    >>> bernoulli_std(torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
    tensor([[0.4714]])
    """
    p = (groups.sum(1, keepdim=True) + smoothing) / (groups.shape[1] + 2 * smoothing)
    return (p * (1 - p)).sqrt()


def whitened_sum(rewards: Tensor, weights: Tensor, group_size: int, eps: float = 1e-4) -> Tensor:
    """Return the weighted sum of rewards [B, K], each whitened within its group by the unbiased deviation (GDPO), [B].

    >>> rewards = torch.tensor([[1.0, 30.0], [0.0, 10.0]])  # two rewards of two siblings
    >>> whitened_sum(rewards, torch.tensor([1.0, 0.5]), group_size=2)
    tensor([ 1.0606, -1.0606])
    """
    groups = rewards.view(-1, group_size, rewards.shape[1])
    centred = groups - groups.mean(1, keepdim=True)
    whitened = centred / (groups.std(1, keepdim=True) + eps)
    return (whitened.view_as(rewards) * weights).sum(1)


def weighted_mean(groups: Tensor, weights: Tensor) -> Tensor:
    """Return the mean of each group [P, G] by weights [P, G], as [P, 1].

    >>> weighted_mean(torch.tensor([[1.0, 0.0]]), torch.tensor([[30.0, 10.0]]))
    tensor([[0.7500]])
    """
    return (weights * groups).sum(1, keepdim=True) / weights.sum(1, keepdim=True)


def majority_scale(groups: Tensor) -> Tensor:
    """Return, for each group [P, G] of rewards from 0 to 1, ``2 √(p (1 - p))`` if its mean p is above ½, else 1 (MCPO).

    >>> majority_scale(torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]]))
    tensor([[1.0000],
            [0.8660]])
    """
    p = groups.mean(1, keepdim=True)
    return torch.where(p > 0.5, 2 * (p * (1 - p)).clamp(min=0).sqrt(), 1.0)


def drop_negatives(groups: Tensor, draws: Tensor) -> Tensor:
    """Return which of [P, G] to keep so that a group has no more negatives than positives (RED-Drop).

    Negatives are below the group's mean; all others, also those at the mean, are positives. Negatives are kept in the
    order of ``draws``, a random number for each completion.

    >>> groups = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]])
    >>> drop_negatives(groups, torch.tensor([[0.1, 0.9, 0.2, 0.5], [0.1, 0.2, 0.3, 0.4]]))
    tensor([[ True, False,  True, False],
            [ True,  True,  True,  True]])
    >>> drop_negatives(torch.tensor([[1.0, 0.5, 0.25, 0.25]]), torch.rand(1, 4))  # the mean is 0.5: two of each
    tensor([[True, True, True, True]])
    """
    centred = groups - groups.mean(1, keepdim=True)
    tolerance = 1e-6 * groups.abs().amax(1, keepdim=True)  # the mean of equal numbers is rounded
    negative = centred < -tolerance
    rank = torch.where(negative, draws, torch.inf).argsort(1).argsort(1)  # rank of each negative in its group
    return ~negative | (rank < (~negative).sum(1, keepdim=True))


def adaptive_temperature(advantages: Tensor, lengths: Tensor, least: float = 0.8) -> float:
    """Return T with ``Σ n A exp(A / T) = 0`` over completions of n tokens, by bisection; at least ``least``.

    The sum falls as T grows. If it is not below 0 at T = ∞, the result is ∞: nothing is reweighted.

    >>> advantages, lengths = torch.tensor([0.5, -0.5]), torch.tensor([10.0, 20.0])
    >>> round(adaptive_temperature(advantages, lengths), 3)  # 10 e^(0.5/T) = 20 e^(-0.5/T)
    1.443
    """

    def total(inverse: float) -> float:
        return float((lengths * advantages * (advantages * inverse).exp()).sum())

    low, high = 0.0, 1 / least
    if total(low) >= 0:
        return math.inf
    if total(high) <= 0:
        return least
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if total(middle) < 0 else (low, middle)
    return 2 / (low + high)


def has_reward_variance(rewards: Tensor, group_size: int, tolerance: float = 1e-6) -> Tensor:
    """Return, as [B] bool, whether the rewards of a completion's group differ by more than ``tolerance``.

    It compares the range of the raw rewards, because the rounding of a standard deviation depends on their size.

    >>> has_reward_variance(torch.tensor([1.0, 1.0, 0.0, 1.0]), group_size=2)
    tensor([False, False,  True,  True])
    """
    groups = grouped(rewards, group_size)
    spread = groups.amax(1) - groups.amin(1)
    return (spread > tolerance).repeat_interleave(group_size)
