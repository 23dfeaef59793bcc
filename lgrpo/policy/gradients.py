"""Comparison of two gradients, given as the parts that this rank holds."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def local_part(gradient: Tensor) -> Tensor:
    """Return this rank's part of a gradient, all of it if it is not sharded."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def inner_products(parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return ⟨g, h⟩, ⟨g, g⟩ and ⟨h, h⟩ of two gradients, given in parts, [3] float64.

    >>> inner_products([(torch.tensor([3.0]), torch.tensor([1.0])), (torch.tensor([4.0]), torch.tensor([0.0]))])
    tensor([ 3., 25.,  1.], dtype=torch.float64)
    """
    total = torch.zeros(3, dtype=torch.float64)
    for g, h in ((g.detach().double(), h.double()) for g, h in parts):
        total = total.to(g.device) + torch.stack([(g * h).sum(), g.square().sum(), h.square().sum()])
    return total


def limit_cosine(cosine: float, limit: float) -> tuple[float, float]:
    """Return how to shorten the part of g along h until their cosine is ``limit``, and what remains of its norm.

    The numbers are a in g' = g − a ‖g‖ h/‖h‖, and ‖g'‖/‖g‖. The part of g orthogonal to h does not change. For
    g = (3, 4) and h = (1, 0), g' is (0, 4) if the limit is 0, and (2.29, 4) if it is 0.497:

    >>> cosine = 0.6
    >>> limit_cosine(cosine, 0.0)
    (0.6, 0.8)
    >>> a, kept = limit_cosine(cosine, 0.497)
    >>> round(3 - a * 5, 2), round(kept * 5, 2)
    (2.29, 4.61)
    """
    orthogonal = math.sqrt(max(0.0, 1 - cosine**2))
    parallel = orthogonal * limit / math.sqrt(1 - limit**2)
    return cosine - parallel, math.hypot(orthogonal, parallel)
