"""Advantages of whole groups: rewards of G siblings side by side in, one number for each completion out."""

from __future__ import annotations

from typing import Literal

from torch import Tensor


def grouped(rewards: Tensor, group_size: int) -> Tensor:
    """Rewards [B] as [P, G].

    >>> import torch
    >>> grouped(torch.tensor([1.0, 0.0, 1.0, 1.0]), group_size=2)
    tensor([[1., 0.],
            [1., 1.]])
    """
    if group_size < 2:
        raise ValueError(f"group_size is {group_size}, but a group needs at least 2 completions to compare")
    if rewards.ndim != 1 or rewards.shape[0] % group_size:
        raise ValueError(f"rewards of shape {tuple(rewards.shape)} are not whole groups of {group_size}")
    return rewards.view(-1, group_size)


def group_centred(rewards: Tensor, group_size: int) -> Tensor:
    """``r - mean(r)`` over each group.

    >>> import torch
    >>> group_centred(torch.tensor([1.0, 0.0, 0.0, 0.0]), group_size=4)
    tensor([ 0.7500, -0.2500, -0.2500, -0.2500])
    """
    groups = grouped(rewards, group_size)
    return (groups - groups.mean(1, keepdim=True)).flatten()


def leave_one_out(rewards: Tensor, group_size: int) -> Tensor:
    """``r_i`` less the mean of its siblings: ``G / (G - 1)`` times the centred reward (RLOO).

    >>> import torch
    >>> leave_one_out(torch.tensor([1.0, 0.0, 0.0, 0.0]), group_size=4)
    tensor([ 1.0000, -0.3333, -0.3333, -0.3333])
    """
    return group_centred(rewards, group_size) * group_size / (group_size - 1)


def group_whitened(
    rewards: Tensor,
    group_size: int,
    eps: float = 1e-4,
    eps_placement: Literal["inside", "outside"] = "inside",
    unbiased: bool = False,
) -> Tensor:
    """Centred rewards over the group's standard deviation.

    ``eps`` is added to the variance, inside the root (Mroueh et al.), or to the standard deviation, outside it (TRL,
    with ``unbiased=True``). With ``eps`` above 0, a group without variance gets 0.

    >>> import torch
    >>> rewards = torch.tensor([1.0, 0.0, 0.0, 0.0])
    >>> group_whitened(rewards, group_size=4)
    tensor([ 1.7316, -0.5772, -0.5772, -0.5772])
    >>> group_whitened(rewards, group_size=4, eps_placement="outside", unbiased=True)
    tensor([ 1.4997, -0.4999, -0.4999, -0.4999])
    """
    groups = grouped(rewards, group_size)
    variance = groups.var(1, keepdim=True, correction=int(unbiased))
    if eps_placement == "inside":
        scale = (variance + eps).sqrt()
    elif eps_placement == "outside":
        scale = variance.sqrt() + eps
    else:
        raise ValueError(f"eps_placement is {eps_placement!r}; it is 'inside' or 'outside' of the root")
    return ((groups - groups.mean(1, keepdim=True)) / scale).flatten()


def has_reward_variance(rewards: Tensor, group_size: int, tolerance: float = 1e-6) -> Tensor:
    """[B] bool: the rewards of this completion's group differ by more than ``tolerance``.

    The test is on the spread of the raw rewards, not on a standard deviation, whose rounding depends on their size.

    >>> import torch
    >>> has_reward_variance(torch.tensor([1.0, 1.0, 0.0, 1.0]), group_size=2)
    tensor([False, False,  True,  True])
    """
    groups = grouped(rewards, group_size)
    spread = groups.amax(1) - groups.amin(1)
    return (spread > tolerance).repeat_interleave(group_size)
