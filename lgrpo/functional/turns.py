"""Turns of episodes: which token belongs to which turn, and returns from a turn on."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def turn_indices(sampled: Tensor) -> Tensor:
    """Return the turn of each sampled token [B, T], from 0; -1 for all others. Observed tokens separate turns.

    >>> turn_indices(torch.tensor([[False, True, True, False, True]]))
    tensor([[-1,  0,  0, -1,  1]])
    """
    is_first = sampled & ~pad(sampled[:, :-1], (1, 0))
    return torch.where(sampled, is_first.cumsum(1) - 1, -1)


def last_turns(turn_rewards: Tensor) -> Tensor:
    """Return the index of the last turn of each episode [B, 1], from the rewards of turns [B, N], NaN where none is."""
    return (~turn_rewards.isnan()).sum(1, keepdim=True) - 1


def turn_returns(turn_rewards: Tensor, rewards: Tensor, discount: float = 1.0) -> Tensor:
    """Return ``R_t = r_t + γ R_{t+1}`` of each turn [B, N]; NaN for turns that an episode does not have.

    ``rewards`` [B] are those of whole episodes. What the turns before the last do not account for is the reward of the
    last turn, so without a discount the return of the first turn is the reward of the episode.

    >>> nan = float("nan")
    >>> turn_rewards = torch.tensor([[0.5, 0.0, 1.0], [0.5, 2.0, nan]])
    >>> turn_returns(turn_rewards, torch.tensor([1.5, 3.0]))  # the second episode has 0.5 for something else
    tensor([[1.5000, 1.0000, 1.0000],
            [3.0000, 2.5000,    nan]])
    >>> turn_returns(turn_rewards, torch.tensor([1.5, 3.0]), discount=0.5)
    tensor([[0.7500, 0.5000, 1.0000],
            [1.7500, 2.5000,    nan]])
    """
    turn, last = torch.arange(turn_rewards.shape[1]), last_turns(turn_rewards)
    earlier = torch.where(turn < last, turn_rewards, 0.0)
    own = torch.where(turn == last, (rewards - earlier.sum(1))[:, None], earlier)
    returns = torch.zeros_like(own)
    following = torch.zeros_like(rewards)
    for t in reversed(range(own.shape[1])):
        following = own[:, t] + discount * following
        returns[:, t] = following
    # rounded as rewards are, so that returns that differ by the order of a sum are equal
    return torch.where(turn <= last, returns.float().to(returns), torch.nan)
