"""Ratios of two policies, clipped surrogates and gates."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Limit of log-ratios: e^20 is half a billion; e^100 would be infinite in float32, and its gradient NaN."""

RatioDenominator = Literal["behaviour", "proximal", "none"]
ClipCentre = Literal["one", "proximal", "proximal_multiplicative"]


def log_ratio(
    policy_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    proximal_logprobs: Tensor | None = None,
    denominator: RatioDenominator = "behaviour",
) -> Tensor:
    """Return log π_θ/π of the chosen policy, per token; ``none`` is π_θ/π_θ = 1, with the gradient of log π_θ.

    >>> policy, behaviour = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -2.0])
    >>> log_ratio(policy, behaviour)
    tensor([0.5000, 0.0000])
    >>> log_ratio(policy, behaviour, denominator="none")
    tensor([0., 0.])
    """
    if denominator == "behaviour":
        return policy_logprobs - behaviour_logprobs
    if denominator == "proximal":
        if proximal_logprobs is None:
            raise ValueError("a ratio over the proximal policy needs proximal_logprobs")
        return policy_logprobs - proximal_logprobs
    if denominator == "none":
        return policy_logprobs - policy_logprobs.detach()
    raise ValueError(f"ratio denominator {denominator!r} is not one of behaviour, proximal, none")


def interpolated_logprobs(policy_logprobs: Tensor, behaviour_logprobs: Tensor, lag: Tensor) -> Tensor:
    """Return log π_k by interpolation, without gradient: ``log π_α / d + (1 - 1/d) log π_θ`` with lag d (A-3PO).

    At lags 0 and 1 it is log π_α. The larger the lag, the nearer is π_k to π_θ.

    >>> policy, behaviour = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-2.0, -2.0, -2.0])
    >>> interpolated_logprobs(policy, behaviour, lag=torch.tensor([0.0, 1.0, 4.0]))
    tensor([-2.0000, -2.0000, -1.2500])
    """
    share = 1 / lag.clamp(min=1.0)
    return share * behaviour_logprobs + (1 - share) * policy_logprobs.detach()


def sequence_log_ratio(log_ratio: Tensor, completion_mask: Tensor, geometric: bool = True) -> Tensor:
    """Return a completion's log-ratio at each of its tokens: the mean over its tokens (geometric), or their sum.

    >>> log_ratios = torch.tensor([[0.0, 0.2, 0.4]])
    >>> sequence_log_ratio(log_ratios, torch.tensor([[False, True, True]]))
    tensor([[0.0000, 0.3000, 0.3000]])
    """
    total = torch.where(completion_mask, log_ratio, 0.0).sum(1, keepdim=True)
    if geometric:
        total = total / completion_mask.sum(1, keepdim=True).clamp(min=1)
    return torch.where(completion_mask, total, 0.0)


def clip_centre(
    log_ratio: Tensor, behaviour_logprobs: Tensor, proximal_logprobs: Tensor | None, centre: ClipCentre
) -> Tensor:
    """Return the centre of the clip's band: 1, or π_k/α (Mroueh et al., equation 6), with its logarithm within ±20.

    >>> clip_centre(torch.zeros(2), torch.zeros(2), torch.tensor([0.0, 0.5]), "proximal")
    tensor([1.0000, 1.6487])
    """
    if centre == "one":
        return torch.ones_like(log_ratio)
    if proximal_logprobs is None:
        raise ValueError(f"clip centre {centre!r} needs proximal_logprobs")
    return (proximal_logprobs - behaviour_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clip_band(centre: Tensor, clip_low: float, clip_high: float, multiplicative: bool = False) -> tuple[Tensor, Tensor]:
    """Return the lower and upper edge: ``max(c - low, 0), c + high``, or ``c (1 - low), c (1 + high)``.

    >>> clip_band(torch.tensor([1.0, 0.1]), 0.2, 0.2)
    (tensor([0.8000, 0.0000]), tensor([1.2000, 0.3000]))
    >>> clip_band(torch.tensor([1.0, 0.1]), 0.2, 0.2, multiplicative=True)
    (tensor([0.8000, 0.0800]), tensor([1.2000, 0.1200]))
    """
    if multiplicative:
        return centre * (1 - clip_low), centre * (1 + clip_high)
    return (centre - clip_low).clamp(min=0.0), centre + clip_high


def clipped_surrogate(ratio: Tensor, advantage: Tensor, low: Tensor | float, high: Tensor | float) -> Tensor:
    """Return ``min(ρA, clip(ρ, low, high) A)`` per token, which never rewards leaving the band.

    >>> clipped_surrogate(torch.tensor([1.5, 0.5, 0.5]), torch.tensor([1.0, 1.0, -1.0]), 0.8, 1.2)
    tensor([ 1.2000,  0.5000, -0.8000])
    """
    clipped = ratio.clamp(min=low, max=high)  # type: ignore[arg-type]
    return torch.minimum(ratio * advantage, clipped * advantage)


def outside_band(ratio: Tensor, advantage: Tensor, low: Tensor | float, high: Tensor | float) -> tuple[Tensor, Tensor]:
    """Return two bool tensors: tokens without gradient because they left the band downwards, and upwards.

    >>> outside_band(torch.tensor([1.5, 1.5, 0.5]), torch.tensor([1.0, -1.0, -1.0]), 0.8, 1.2)
    (tensor([False, False,  True]), tensor([ True, False, False]))
    """
    return (advantage < 0) & (ratio < low), (advantage > 0) & (ratio > high)


def one_side(ratio: Tensor, advantage: Tensor, low: Tensor | float, high: Tensor | float) -> Tensor:
    """Keep a token unless its ratio left the band on the side its advantage pushes to, as the min-clip does.

    >>> one_side(torch.tensor([1.5, 1.5, 0.5, 0.5]), torch.tensor([1.0, -1.0, 1.0, -1.0]), 0.8, 1.2)
    tensor([False,  True,  True, False])
    """
    return ((advantage >= 0) & (ratio <= high)) | ((advantage <= 0) & (ratio >= low))


def two_side(ratio: Tensor, low: Tensor | float, high: Tensor | float) -> Tensor:
    """Keep a token inside the band.

    >>> two_side(torch.tensor([0.5, 1.0, 1.5]), 0.8, 1.2)
    tensor([False,  True, False])
    """
    return (ratio >= low) & (ratio <= high)


def ring(ratio: Tensor, advantage: Tensor, low: float, high: float, outer_low: float, outer_high: float) -> Tensor:
    """Keep a token inside the band, and one far outside whose advantage pulls it back.

    >>> ring(torch.tensor([0.3, 0.7, 1.0, 1.5, 4.0]), torch.tensor(1.0), 0.8, 1.2, 0.4, 3.0)
    tensor([ True, False,  True, False, False])
    >>> ring(torch.tensor([0.3, 0.7, 1.0, 1.5, 4.0]), torch.tensor(-1.0), 0.8, 1.2, 0.4, 3.0)
    tensor([False, False,  True, False,  True])
    """
    inside = two_side(ratio, low, high)
    return inside | ((advantage >= 0) & (ratio <= outer_low)) | ((advantage <= 0) & (ratio >= outer_high))


def harmful(log_ratio: Tensor, advantage: Tensor) -> Tensor:
    """Return the tokens whose ratio already is on the side their advantage pushes to.

    >>> harmful(torch.tensor([0.1, 0.9, -0.9]), torch.tensor([1.0, -1.0, -1.0]))
    tensor([ True, False,  True])
    """
    return log_ratio * advantage > 0


def second_moment_threshold(squares: Tensor, limit: float) -> float:
    """Return the threshold below which the mean of ``squares`` [n] is at most ``limit``; infinite if all may stay.

    It lies half-way between the largest square that stays and the next one, so that rounding does not decide. Equal
    squares stay together or not at all.

    >>> second_moment_threshold(torch.tensor([0.0, 1.0, 0.0625]), limit=0.04)  # the mean of 0 and 0.0625 is 0.03125
    0.53125
    """
    squares = squares.double().sort().values
    means = squares.cumsum(0) / torch.arange(1, len(squares) + 1, device=squares.device)
    dropped = squares[means > limit]  # the means of a sorted sequence rise, so a prefix is kept
    if not len(dropped):
        return math.inf
    smallest = float(dropped[0])
    kept = squares[squares < smallest]
    return (smallest + (float(kept[-1]) if len(kept) else 0.0)) / 2
