"""Quantiles of the ratio from a histogram that can be added up over micro-batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from lgrpo.functional import MAX_LOG_RATIO

QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
SMALLEST = 1e-6
"""Distance of the log-ratio from 0 up to which a ratio counts as 1."""
PER_DECADE = 32
"""Bins for each factor of ten of |log ρ|: a quantile is exact to 4 % of it."""


def bin_edges() -> Tensor:
    """Return the edges of the bins of log ρ, ascending and symmetric around 0."""
    decades = math.log10(MAX_LOG_RATIO / SMALLEST)
    above = torch.logspace(
        math.log10(SMALLEST), math.log10(MAX_LOG_RATIO), round(PER_DECADE * decades) + 1, dtype=torch.float64
    )
    return torch.cat([-above.flip(0), above])


def bin_counts(edges: Tensor, ratio: Tensor, mask: Tensor) -> Tensor:
    """Return the number of ratios inside the mask in each of the ``len(edges) + 1`` bins, in float64.

    ``torch.bincount`` would make the trainer wait for the GPU.
    """
    bins = torch.bucketize(ratio.double().log().flatten(), edges)
    counts = torch.zeros(len(edges) + 1, dtype=torch.float64, device=ratio.device)
    return counts.scatter_add_(0, bins, mask.flatten().double())


def ratio_quantiles(counts: Sequence[float], smallest: float, largest: float) -> dict[str, float]:
    """Return the quantiles of ``QUANTILES`` by name: the middle of the bin that reaches each share of the counts.

    >>> edges, ratio = bin_edges(), torch.linspace(0.5, 1.5, 101)
    >>> counts = bin_counts(edges, ratio, torch.ones(101, dtype=torch.bool))
    >>> {name: round(value, 2) for name, value in ratio_quantiles(counts.tolist(), 0.5, 1.5).items()}
    {'q01': 0.52, 'q10': 0.61, 'q50': 1.0, 'q90': 1.41, 'q99': 1.49}
    """
    edges, total = bin_edges().tolist(), sum(counts)
    middles = [edges[0], *((low + high) / 2 for low, high in pairwise(edges)), edges[-1]]
    found, reached, wanted = {}, 0.0, dict(QUANTILES)
    for middle, count in zip(middles, counts, strict=True):
        reached += count
        for name in [name for name, share in wanted.items() if count and reached >= share * total]:
            found[name] = min(max(math.exp(middle), smallest), largest)
            del wanted[name]
    return found
