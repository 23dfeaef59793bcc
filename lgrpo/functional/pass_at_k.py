"""The chance that one of k samples is right."""

from __future__ import annotations

import torch
from torch import Tensor


def pass_at_k(num_samples: Tensor, num_correct: Tensor, k: int) -> Tensor:
    """Unbiased estimate ``1 - C(n-c, k) / C(n, k)`` per problem, from c right answers in n samples.

    >>> pass_at_k(torch.tensor([4, 4, 4]), torch.tensor([0, 1, 4]), k=2)
    tensor([0.0000, 0.5000, 1.0000])
    """
    if k < 1 or bool((num_samples < k).any()):
        raise ValueError(f"pass@{k} needs at least {k} samples of every problem, and k of 1 or more")
    n, c = num_samples.double(), num_correct.double()
    terms = torch.arange(k, dtype=torch.float64, device=n.device)
    factors = ((n - c)[:, None] - terms).clamp(min=0) / (n[:, None] - terms)
    return (1 - factors.prod(1)).float()
