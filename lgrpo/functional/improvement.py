"""Terms of Mroueh et al.'s Theorem 1 for each prompt, estimated from a group of samples of α.

With ρ = π(y)/α(y) of whole completions, s the standard deviation of the reward under α and rewards in [0, 1]:
``J(π) - J(π_k) ≥ L_α(π) - c (1 - s)/s TV(π, α) - c TV(π_k, α)``, where c is 2 as stated (1 is also valid), and
``s L_α(π) = J(π) - J(α)`` exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lgrpo.functional.advantage import bernoulli_std, group_std
from lgrpo.functional.off_policy import k3_of_ratio, pinsker, total_variation


def expected_gain(log_ratio: Tensor, rewards: Tensor) -> Tensor:
    """Return J(π) - J(α) of each prompt, [P], from its group, [P, G]: the sample covariance of ρ and r.

    Since the mean of ρ is 1, ``E ρ r - E r = Cov(ρ, r)``; divided by G - 1 the estimate is unbiased. A group whose
    rewards are all equal gives 0.

    >>> expected_gain(torch.tensor([[1.5, 0.5]]).log(), torch.tensor([[1.0, 0.0]]))
    tensor([0.5000])
    """
    centred = rewards - rewards.mean(1, keepdim=True)
    return (torch.expm1(log_ratio) * centred).sum(1) / (rewards.shape[1] - 1)


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
