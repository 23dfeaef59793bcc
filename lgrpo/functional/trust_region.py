"""Distances of the policy from the behaviour policy at single tokens, and surrogates without a hard clip."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from lgrpo.functional.off_policy import k3_of_ratio
from lgrpo.functional.surrogate import MAX_LOG_RATIO

Divergence = Literal["tv", "kl"]
LEAST_REST = 1e-8
"""Lower limit of 1 - π, the probability of all other tokens: its logarithm stays finite."""


def binary_total_variation(policy_logprobs: Tensor, behaviour_logprobs: Tensor) -> Tensor:
    """Return ``|π - α|`` of each token: the total variation of "this token or another one".

    It is never above the total variation over the whole vocabulary.

    >>> binary_total_variation(torch.tensor([0.9, 0.01]).log(), torch.tensor([0.6, 0.001]).log())
    tensor([0.3000, 0.0090])
    """
    return (policy_logprobs.exp() - behaviour_logprobs.exp()).abs()


def binary_kl(policy_logprobs: Tensor, behaviour_logprobs: Tensor) -> Tensor:
    """Return ``α log α/π + (1 - α) log (1 - α)/(1 - π)`` of each token: KL(α ‖ π) of "this token or another one".

    It is never above KL(α ‖ π) over the whole vocabulary.

    >>> binary_kl(torch.tensor([0.9, 0.01]).log(), torch.tensor([0.6, 0.001]).log())
    tensor([0.3112, 0.0067])
    """
    rest, behaviour_rest = (
        (-torch.expm1(logprobs)).clamp(min=LEAST_REST) for logprobs in (policy_logprobs, behaviour_logprobs)
    )
    same = behaviour_logprobs.exp() * (behaviour_logprobs - policy_logprobs)
    return same + behaviour_rest * (behaviour_rest.log() - rest.log())


def within_divergence(
    policy_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantage: Tensor,
    low: float,
    high: float,
    divergence: Divergence = "tv",
) -> Tensor:
    """Keep a token unless it is farther from α than the limit and its advantage pushes it farther away (DPPO).

    The limit is ``high`` for a positive advantage and ``low`` for a negative one.

    >>> policy, behaviour = torch.tensor([0.9, 0.9, 0.3, 0.3]).log(), torch.tensor([0.6]).log()
    >>> within_divergence(policy, behaviour, torch.tensor([1.0, -1.0, 1.0, -1.0]), low=0.2, high=0.2)
    tensor([False,  True,  True, False])
    """
    distance = binary_total_variation if divergence == "tv" else binary_kl
    distances = distance(policy_logprobs, behaviour_logprobs)
    leaves_upwards = (advantage > 0) & (policy_logprobs > behaviour_logprobs) & (distances > high)
    leaves_downwards = (advantage < 0) & (policy_logprobs < behaviour_logprobs) & (distances > low)
    return ~(leaves_upwards | leaves_downwards)


def k2_of_ratio(log_ratio: Tensor) -> Tensor:
    """Return ``(log ρ)² / 2``, which is the same for ρ and 1/ρ.

    >>> k2_of_ratio(torch.tensor([0.0, 0.5, -0.5]))
    tensor([0.0000, 0.1250, 0.1250])
    """
    return log_ratio.square() / 2


def token_divergence(
    policy_logprobs: Tensor, behaviour_logprobs: Tensor, statistic: Literal["kl", "k2", "k3"]
) -> Tensor:
    """Return the distance of each token from α: the binary KL, or k2 or k3 of its ratio π/α, limited to e^±20.

    >>> [token_divergence(torch.tensor(0.9).log(), torch.tensor(0.6).log(), name) for name in ("kl", "k2", "k3")]
    [tensor(0.3112), tensor(0.0822), tensor(0.0945)]
    """
    if statistic == "kl":
        return binary_kl(policy_logprobs, behaviour_logprobs)
    log_ratio = (policy_logprobs - behaviour_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return k2_of_ratio(log_ratio) if statistic == "k2" else k3_of_ratio(log_ratio)


def sequence_max(values: Tensor, completion_mask: Tensor) -> Tensor:
    """Return the largest value of a completion's tokens at each of them; values are not negative.

    >>> sequence_max(torch.tensor([[9.0, 0.2, 0.4]]), torch.tensor([[False, True, True]]))
    tensor([[0.0000, 0.4000, 0.4000]])
    """
    largest = torch.where(completion_mask, values, 0.0).amax(1, keepdim=True)
    return torch.where(completion_mask, largest, 0.0)


def follows_trigger(ratio: Tensor, completion_mask: Tensor, threshold: float) -> Tensor:
    """Return the tokens after the first one of their completion whose ratio is below a threshold, [B, T] bool (μ-GRPO).

    >>> ratio = torch.tensor([[1.0, 0.9, 1e-5, 1.1, 0.8], [1e-5, 0.9, 1.0, 1.1, 0.8]])
    >>> mask = torch.tensor([[True] * 5, [False] + [True] * 4])
    >>> follows_trigger(ratio, mask, threshold=1e-4)
    tensor([[False, False, False,  True,  True],
            [False, False, False, False, False]])
    """
    triggers = (completion_mask & (ratio < threshold)).long()
    return completion_mask & (triggers.cumsum(1) - triggers > 0)


def within_entropy_band(log_ratio: Tensor, entropy: Tensor, base: float, slope: float) -> Tensor:
    """Keep a token if ``|log ρ| ≤ base + slope · H``: the band widens with the entropy H of the policy (ESTR).

    >>> within_entropy_band(torch.tensor([0.3, 0.3, -0.9]), torch.tensor([0.0, 1.0, 2.0]), base=0.1, slope=0.4)
    tensor([False,  True,  True])
    """
    return log_ratio.abs() <= base + slope * entropy


def soft_gate(ratio: Tensor, temperature: Tensor | float) -> Tensor:
    """Return ``4/τ σ(τ(ρ - 1))`` (SAPO): its slope is 1 at ρ = 1 and falls to 0 on both sides, faster with larger τ.

    >>> ratio = torch.tensor([0.5, 1.0, 4.0], requires_grad=True)
    >>> soft_gate(ratio, 2.0).sum().backward()
    >>> ratio.grad
    tensor([0.7864, 1.0000, 0.0099])
    """
    return 4 / temperature * torch.sigmoid(temperature * (ratio - 1))


def gamma_weight(log_ratio: Tensor, shape: Tensor | float, rate: Tensor | float) -> Tensor:
    """Return ``ρ^k e^{λ(1 - ρ)}`` (VESPO): 1 at ρ = 1, 0 for very small and very large ratios, largest at ρ = k/λ.

    >>> gamma_weight(torch.tensor([0.1, 1.0, 1.5, 10.0]).log(), shape=3.0, rate=2.0)
    tensor([6.0496e-03, 1.0000e+00, 1.2416e+00, 1.5230e-05])
    """
    return torch.exp(shape * log_ratio - rate * torch.expm1(log_ratio))


def entropy_weight(entropy: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
    """Return H of each token if its advantage is positive, otherwise the largest H of the completion minus H (RL-ZVP).

    >>> entropy, mask = torch.tensor([[0.1, 0.7, 0.4], [0.1, 0.7, 0.4]]), torch.ones(2, 3, dtype=torch.bool)
    >>> entropy_weight(entropy, mask, torch.tensor([[0.1], [-0.1]]))
    tensor([[0.1000, 0.7000, 0.4000],
            [0.6000, 0.0000, 0.3000]])
    """
    entropy = torch.where(mask, entropy, 0.0)
    return torch.where(advantages > 0, entropy, entropy.amax(1, keepdim=True) - entropy)


def k3_hinge(log_ratio: Tensor, width: float) -> Tensor:
    """Return ``max(k3(d) - k3(±width), 0)`` with d = log ρ and the sign of d (MCPO).

    >>> k3_hinge(torch.tensor([-0.5, -0.1, 0.1, 0.5]), width=0.2)
    tensor([0.0878, 0.0000, 0.0000, 0.1273])
    """
    excess = k3_of_ratio(log_ratio) - k3_of_ratio(log_ratio.detach().sign() * width)
    return torch.where(log_ratio.abs() > width, excess, 0.0)
