"""Divergence of the policy from the behaviour policy, over micro-batches and ranks."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from lgrpo.functional import (
    chi_squared,
    completion_log_ratio,
    effective_sample_size,
    k3_of_ratio,
    outside_band,
    pinsker,
)

QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
_COUNTS = ("positive", "negative", "clipped_positive", "clipped_negative")


class OffPolicyMetrics(Metric):
    """Divergences, effective sample size and quantiles of completions' ratios, and clip fractions of tokens.

    >>> metric = OffPolicyMetrics()
    >>> log_ratio = torch.tensor([[0.1, 0.2], [0.0, -0.3]])
    >>> mask = torch.ones(2, 2, dtype=torch.bool)
    >>> metric.update(log_ratio=log_ratio, mask=mask, advantages=torch.tensor([[1.0, 1.0], [-1.0, -1.0]]))
    >>> {name: round(float(value), 4) for name, value in metric.compute().items() if "ratio" not in name}
    {'kl': 0.0, 'kl_k3': 0.0453, 'tv_rms': 0.1506, 'chi_squared': 0.0948, 'effective_sample_size': 0.9218,
     'clip_fraction_positive': 0.5, 'clip_fraction_negative': 0.5, 'clip_fraction': 0.5}
    """

    full_state_update = False

    log_ratios: list[Tensor]
    counts: Tensor

    def __init__(self, clip_low: float = 0.2, clip_high: float = 0.2) -> None:
        """
        Args:
            clip_low: Distance below 1 at which the ratio of a token with a negative advantage counts as clipped.
            clip_high: Distance above 1 at which that of a token with a positive advantage does.
        """
        super().__init__()
        self.clip_low, self.clip_high = clip_low, clip_high
        self.add_state("log_ratios", default=[], dist_reduce_fx="cat")
        self.add_state("counts", default=torch.zeros(len(_COUNTS), dtype=torch.float64), dist_reduce_fx="sum")

    @torch.no_grad()
    def update(self, *, log_ratio: Tensor, mask: Tensor, advantages: Tensor) -> None:
        """Add completions, all [B, T]: log π/α of their tokens, which tokens were sampled, and advantages."""
        self.log_ratios.append(completion_log_ratio(log_ratio, mask).to(self.counts.device))
        below, above = outside_band(log_ratio.exp(), advantages, 1 - self.clip_low, 1 + self.clip_high)
        flags = (advantages > 0, advantages < 0, above, below)
        self.counts += torch.stack([(flag & mask).sum() for flag in flags]).to(self.counts)

    def compute(self) -> dict[str, Tensor]:
        """Return the metrics; only the clip fractions if no completion was added."""
        positive, negative, above, below = self.counts
        clips = {
            "clip_fraction_positive": above / positive.clamp(min=1),
            "clip_fraction_negative": below / negative.clamp(min=1),
            "clip_fraction": (above + below) / (positive + negative).clamp(min=1),
        }
        log_ratios = dim_zero_cat(self.log_ratios)
        if not len(log_ratios):
            return clips
        k3 = k3_of_ratio(log_ratios).mean()
        metrics = {
            "kl": -log_ratios.mean(),
            "kl_k3": k3,
            "tv_rms": pinsker(k3),
            "chi_squared": chi_squared(log_ratios).mean(),
            "effective_sample_size": effective_sample_size(log_ratios),
        }
        points = torch.tensor(list(QUANTILES.values()), dtype=torch.float64, device=log_ratios.device)
        quantiles = log_ratios.quantile(points).exp()
        metrics |= {f"ratio_{name}": value for name, value in zip(QUANTILES, quantiles, strict=True)}
        return metrics | {"ratio_max": log_ratios.max().exp()} | clips
