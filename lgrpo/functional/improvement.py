"""Lower bounds of the improvement for each prompt, estimated from a group of samples of α.

Mroueh et al.'s Theorem 1: with ρ = π(y)/α(y) of whole completions, s the standard deviation of the reward under α and
rewards in [0, 1], ``J(π) - J(π_k) ≥ L_α(π) - c (1 - s)/s TV(π, α) - c TV(π_k, α)``, where c is 2 as stated (1 is also
valid), and ``s L_α(π) = J(π) - J(α)`` exactly.

TRM (Li et al., arXiv 2512.23075): with ratios ρ_t of single tokens and rewards in [0, 1], ``J(π) - J(α) ≥ L' - B``,
where ``L' = Cov_α(Σ_t (ρ_t - 1), r)`` and B is made of the total variation and the KL of tokens, so that it grows more
slowly with the length of completions. Since ``J(π_k) - J(α) ≤ TV(π_k, α)``, also
``J(π) - J(π_k) ≥ L' - B - TV(π_k, α)``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lgrpo.functional.advantage import bernoulli_std, group_std
from lgrpo.functional.off_policy import k3_of_ratio, pinsker, total_variation
from lgrpo.functional.surrogate import MAX_LOG_RATIO
from lgrpo.functional.trust_region import binary_kl, binary_total_variation


def expected_gain(log_ratio: Tensor, rewards: Tensor) -> Tensor:
    """Return J(π) - J(α) of each prompt, [P], from its group, [P, G]: the sample covariance of ρ and r.

    Since the mean of ρ is 1, ``E ρ r - E r = Cov(ρ, r)``; divided by G - 1 the estimate is unbiased. A group whose
    rewards are all equal gives 0.

    >>> expected_gain(torch.tensor([[1.5, 0.5]]).log(), torch.tensor([[1.0, 0.0]]))
    tensor([0.5000])
    """
    return _covariance(torch.expm1(log_ratio), rewards)


def _covariance(values: Tensor, rewards: Tensor) -> Tensor:
    centred = rewards - rewards.mean(1, keepdim=True)
    return (values * centred).sum(1) / (rewards.shape[1] - 1)


def improvement_bound(surrogate: Tensor, scale: Tensor, tv: Tensor, tv_proximal: Tensor, factor: float = 2.0) -> Tensor:
    """Return the lower bound of J(π) - J(π_k): ``L_α - c (1 - s)/s TV(π, α) - c TV(π_k, α)``.

    >>> terms = torch.tensor([0.2]), torch.tensor([0.5]), torch.tensor([0.05]), torch.tensor([0.0])
    >>> improvement_bound(*terms), improvement_bound(*terms, factor=1.0)
    (tensor([0.1000]), tensor([0.1500]))
    """
    return surrogate - factor * ((1 - scale) / scale * tv + tv_proximal)


def improvement_terms(
    log_ratio: Tensor, proximal_log_ratio: Tensor, rewards: Tensor, eps: float = 1e-4
) -> dict[str, Tensor]:
    """Return every term of the theorem for each prompt, [P], from log π/α, log π_k/α and rewards of its group, [P, G].

    s is estimated twice: as the group's standard deviation (``s``), and as √(p(1 - p) + eps) with p smoothed towards ½
    (``s_bernoulli``). Names with ``_pinsker`` use Pinsker's inequality for the total variation instead of ½ E|ρ - 1|.

    >>> terms = improvement_terms(torch.tensor([[1.2, 0.8]]).log(), torch.zeros(1, 2), torch.tensor([[1.0, 0.0]]))
    >>> {name: round(terms[name].item(), 3) for name in ("gain", "s", "coefficient", "tv", "bound_2", "bound_1")}
    {'gain': 0.2, 's': 0.5, 'coefficient': 1.0, 'tv': 0.1, 'bound_2': 0.2, 'bound_1': 0.3}
    """
    gain = expected_gain(log_ratio, rewards)
    scales = {
        "": group_std(rewards, eps).squeeze(1),
        "_bernoulli": (bernoulli_std(rewards).squeeze(1).square() + eps).sqrt(),
    }
    variations = {
        "": (total_variation(log_ratio).mean(1), total_variation(proximal_log_ratio).mean(1)),
        "_pinsker": (pinsker(k3_of_ratio(log_ratio).mean(1)), pinsker(k3_of_ratio(proximal_log_ratio).mean(1))),
    }
    terms = {"gain": gain, "gain_rollout": gain - expected_gain(proximal_log_ratio, rewards)}
    for name, scale in scales.items():
        terms |= {f"s{name}": scale, f"coefficient{name}": (1 - scale) / scale, f"surrogate{name}": gain / scale}
    for name, (tv, tv_proximal) in variations.items():
        terms |= {f"tv{name}": tv, f"tv_proximal{name}": tv_proximal}
    for factor in (2, 1):
        for name, of_scale, of_tv in (("", "", ""), ("_bernoulli", "_bernoulli", ""), ("_pinsker", "", "_pinsker")):
            terms[f"bound_{factor}{name}"] = improvement_bound(
                terms[f"surrogate{of_scale}"], scales[of_scale], *variations[of_tv], factor=factor
            )
    return terms


def trust_region_penalty(
    tv: Tensor, lengths: Tensor, largest_tv: Tensor, largest_kl: Tensor, completion_tv: Tensor
) -> Tensor:
    """Return TRM's bound B of ``|J(π) - J(α) - L'|`` for each prompt, [P]: the smaller one of two.

    ε and δ are the largest total variation and KL of a token, T is the longest length, and
    ``c(n) = min(1, n ε, √(n δ/2))`` bounds the total variation over n tokens. The two are ``4 Σ_t TV_t c(T - t)``
    (adaptive) and ``4 min(1, ε, √(δ/2)) Σ_t min(c(t - 1), TV(π, α))`` (marginal and mixed).

    >>> tv, length, largest = torch.full((1, 100), 1e-3), torch.tensor([100]), torch.tensor([2e-3])
    >>> trust_region_penalty(tv, length, largest, largest_kl=torch.tensor([1e-5]), completion_tv=torch.tensor([0.02]))
    tensor([0.0059])

    Args:
        tv: Mean total variation of the t-th token of a completion, [P, T]; 0 after the end.
        lengths: Length of the longest completion, [P].
        largest_tv: Largest total variation of a token, [P].
        largest_kl: Largest KL(α ‖ π) of a token, [P].
        completion_tv: Total variation of whole completions, TV(π, α), [P].
    """
    step = torch.arange(tv.shape[1], device=tv.device)
    after = lengths[:, None] - 1 - step

    def shift(count: Tensor) -> Tensor:
        by_kl = (count * largest_kl[:, None] / 2).sqrt()
        return torch.minimum(count * largest_tv[:, None], by_kl).clamp(max=1.0)

    adaptive = 4 * (tv * shift(after.clamp(min=0))).sum(1)
    token = torch.minimum(largest_tv, (largest_kl / 2).sqrt()).clamp(max=1.0)
    context = torch.minimum(shift(step.expand_as(after)), completion_tv[:, None])
    return torch.minimum(adaptive, 4 * token * torch.where(after >= 0, context, 0.0).sum(1))


def trust_region_terms(
    log_ratio: Tensor, behaviour_logprobs: Tensor, completion_mask: Tensor, rewards: Tensor
) -> dict[str, Tensor]:
    """Return the terms of TRM's bound for each prompt, [P], from tokens [P G, T] of its group and rewards [P, G].

    The KL and the total variation of a token are those of "this token or another one", which are never above the true
    ones: ``penalty_trm`` is too small if the other tokens' probabilities moved among each other.

    >>> policy, behaviour = torch.tensor([[0.6, 0.5], [0.4, 0.5]]).log(), torch.full((2, 2), 0.5).log()
    >>> whole = torch.ones(2, 2, dtype=torch.bool)
    >>> terms = trust_region_terms(policy - behaviour, behaviour, whole, torch.tensor([[1.0, 0.0]]))
    >>> {name: round(value.item(), 3) for name, value in terms.items()}
    {'surrogate_trm': 0.2, 'penalty_trm': 0.04, 'kl_token_max': 0.02, 'tv_token_max': 0.1}
    """
    (num_prompts, size), width = rewards.shape, log_ratio.shape[1]  # no prompt, if all completions are recorded
    log_ratio = torch.where(completion_mask, log_ratio, 0.0).double().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    behaviour = torch.where(completion_mask, behaviour_logprobs, 0.0).double()

    def largest(values: Tensor) -> Tensor:
        return torch.where(completion_mask, values, 0.0).view(num_prompts, size * width).amax(1)

    changes = torch.where(completion_mask, torch.expm1(log_ratio), 0.0)
    position = (completion_mask.cumsum(1) - 1).clamp(min=0)  # of each token within its completion
    tv = torch.zeros_like(changes).scatter_add_(1, position, changes.abs() / 2).view(num_prompts, size, width).mean(1)
    completions = log_ratio.sum(1).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).view(num_prompts, size)
    kl_max = largest(binary_kl(behaviour + log_ratio, behaviour))
    tv_max = largest(binary_total_variation(behaviour + log_ratio, behaviour))
    lengths = completion_mask.sum(1).view(num_prompts, size).amax(1)
    return {
        "surrogate_trm": _covariance(changes.sum(1).view(num_prompts, size), rewards),
        "penalty_trm": trust_region_penalty(tv, lengths, tv_max, kl_max, total_variation(completions).mean(1)),
        "kl_token_max": kl_max,
        "tv_token_max": tv_max,
    }
