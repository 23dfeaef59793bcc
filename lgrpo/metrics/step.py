"""Metrics of one optimizer step, summed over its micro-batches and ranks."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric

from lgrpo.metrics.ratio_histogram import bin_counts, bin_edges, ratio_quantiles

SUMS = (
    "loss",
    "tokens",
    "ratio_tokens",
    "behaviour_tokens",
    "fresh_tokens",
    "lag_sequences",
    "ratio",
    "ratio_squared",
    "clipped_low",
    "clipped_high",
    "band_tokens",
    "outside_band",
    "fresh_band_tokens",
    "fresh_outside_band",
    "kl_behaviour",
    "kl_reference",
    "teacher_tokens",
    "kl_teacher",
    "entropy",
    "lag",
    "mismatch",
)
"""Names of the entries of ``StepMetrics.sums``. A count of tokens or sequences is the divisor of some of the others."""
LAG_BUCKETS = ("0", "1", "2-3", "4-7", "8-15", "16-31", "32-")
"""Names of ranges of lags, of doubling width."""
LAG_EDGES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""First lags of all ranges but the first."""
MAXIMA = ("ratio", "negative_ratio", "lag", "mismatch", "mismatch_p95", "mismatch_p99")
"""Names of the entries of ``StepMetrics.maxima``."""


class StepMetrics(Metric):
    """Means over the live tokens of one optimizer step, with two collectives for any number of metrics."""

    full_state_update = False

    sums: Tensor
    """The entries of ``SUMS``, then the bins of a histogram of the ratio, then |log π_θ/π_α| and number of the live
    tokens in each range of lags."""
    maxima: Tensor
    edges: Tensor
    lag_edges: Tensor

    def __init__(self) -> None:
        super().__init__()
        edges = bin_edges()
        self.register_buffer("edges", edges, persistent=False)
        size = len(SUMS) + len(edges) + 1 + 2 * len(LAG_BUCKETS)
        self.register_buffer("lag_edges", torch.tensor(LAG_EDGES), persistent=False)
        self.add_state("sums", default=torch.zeros(size, dtype=torch.float64), dist_reduce_fx="sum")
        lowest = torch.full((len(MAXIMA),), -torch.inf, dtype=torch.float64)
        self.add_state("maxima", default=lowest, dist_reduce_fx="max")

    @torch.no_grad()
    def update(
        self,
        *,
        loss: Tensor,
        mask: Tensor,
        sampled: Tensor,
        log_ratio: Tensor,
        ratio: Tensor,
        clipped_low: Tensor,
        clipped_high: Tensor,
        outside_band: Tensor | None,
        entropy: Tensor,
        kl_reference: Tensor | None,
        kl_teacher: Tensor | None,
        lag: Tensor,
        behaviour_known: Tensor,
    ) -> None:
        """Add a micro-batch. [B, T] tensors count where ``mask`` is set; ``log_ratio`` is log π_θ/π_α.

        The engine's mismatch counts all ``sampled`` tokens: a wrong engine may be why a rollout has none in the loss.
        ``outside_band`` is None if the loss has no band. Recorded completions may lack data: their ``lag`` is NaN if
        unknown, and metrics of log π_α count only tokens where ``behaviour_known`` is set. ``lag`` is [B], or
        [B, T] if tokens of a completion differ; a completion then counts with the mean of its tokens in the loss.
        """
        token_lag = lag if lag.ndim == 2 else lag[:, None]
        lag_is_known = mask & ~token_lag.isnan()
        has_lag, is_known = lag_is_known.any(1), mask & behaviour_known
        has_ratio, is_fresh = mask & (behaviour_known | ~ratio.isnan()), sampled & (token_lag == 0)
        lags = lag if lag.ndim == 1 else _where(lag_is_known, lag).sum(1) / lag_is_known.sum(1)
        known_log_ratio, known_ratio = _where(is_known, log_ratio), _where(has_ratio, ratio)
        nothing = loss.new_zeros(())
        mismatch = log_ratio.abs()  # of fresh tokens: α is π_θ, computed by the engine
        sums = {
            "loss": loss,
            "tokens": mask.sum(),
            "ratio_tokens": has_ratio.sum(),
            "behaviour_tokens": is_known.sum(),
            "fresh_tokens": is_fresh.sum(),
            "lag_sequences": has_lag.sum(),
            "ratio": known_ratio.sum(),
            "ratio_squared": known_ratio.square().sum(),
            "clipped_low": _where(mask, clipped_low).sum(),
            "clipped_high": _where(mask, clipped_high).sum(),
            "band_tokens": nothing if outside_band is None else has_ratio.sum(),
            "outside_band": nothing if outside_band is None else _where(has_ratio, outside_band).sum(),
            "fresh_band_tokens": nothing if outside_band is None else (has_ratio & is_fresh).sum(),
            "fresh_outside_band": nothing if outside_band is None else _where(has_ratio & is_fresh, outside_band).sum(),
            # k3 of KL(π_α ‖ π_θ), because α sampled the tokens
            "kl_behaviour": (known_log_ratio.exp() - 1 - known_log_ratio).sum(),
            "kl_reference": nothing if kl_reference is None else _where(mask, kl_reference).sum(),
            "teacher_tokens": nothing if kl_teacher is None else mask.sum(),
            "kl_teacher": nothing if kl_teacher is None else _where(mask, kl_teacher).sum(),
            "entropy": _where(mask, entropy).sum(),
            "lag": _where(has_lag, lags).sum(),
            "mismatch": _where(is_fresh, mismatch).sum(),
        }
        named = torch.stack([sums[name].double() for name in SUMS])
        by_lag = self._by_lag(lag, known_log_ratio.abs(), is_known & ~token_lag.isnan())
        self.sums += torch.cat([named, bin_counts(self.edges, ratio, has_ratio), *by_lag])
        maxima = {
            "ratio": _max(has_ratio, ratio),
            "negative_ratio": _max(has_ratio, -ratio),
            "lag": _max(has_lag, lag) if lag.ndim == 1 else _max(lag_is_known, lag),
            "mismatch": _max(is_fresh, mismatch),
            **dict(zip(("mismatch_p95", "mismatch_p99"), _percentiles(is_fresh, mismatch), strict=True)),
        }
        self.maxima = torch.maximum(self.maxima, torch.stack([maxima[name] for name in MAXIMA]))

    def _by_lag(self, lag: Tensor, values: Tensor, mask: Tensor) -> list[Tensor]:
        """Return the sum of values inside a mask, and their number, for each range of lags."""
        if lag.ndim == 1:
            values, mask = torch.where(mask, values, 0.0).sum(1), mask.sum(1)
        else:
            values = torch.where(mask, values, 0.0)
        buckets = torch.bucketize(lag.nan_to_num(0.0), self.lag_edges, right=True).flatten()
        nothing = torch.zeros(len(LAG_BUCKETS), dtype=torch.float64, device=lag.device)
        return [nothing.scatter_add(0, buckets, summed.flatten().double()) for summed in (values, mask)]

    def compute(self) -> dict[str, float]:
        sums = self.sums.tolist()
        total, (counts, distances, numbers) = dict(zip(SUMS, sums, strict=False)), _parts(sums[len(SUMS) :])
        largest = dict(zip(MAXIMA, self.maxima.tolist(), strict=True))
        metrics = {"loss": total["loss"], "live_tokens": total["tokens"]}
        if total["fresh_tokens"]:
            metrics["engine_mismatch_mean"] = total["mismatch"] / total["fresh_tokens"]
            metrics["engine_mismatch_max"] = largest["mismatch"]
            if largest["mismatch_p99"] >= 0:
                metrics["engine_mismatch_p95"] = largest["mismatch_p95"]
                metrics["engine_mismatch_p99"] = largest["mismatch_p99"]
        if not total["tokens"]:
            return metrics
        if total["lag_sequences"]:
            metrics |= {"lag": total["lag"] / total["lag_sequences"], "lag_max": largest["lag"]}
        if total["ratio_tokens"]:
            ratio_mean, square = (total[name] / total["ratio_tokens"] for name in ("ratio", "ratio_squared"))
            metrics |= {
                "ratio_mean": ratio_mean,
                "ratio_std": max(square - ratio_mean**2, 0.0) ** 0.5,
                "ratio_min": -largest["negative_ratio"],
                "ratio_max": largest["ratio"],
            }
            quantiles = ratio_quantiles(counts, metrics["ratio_min"], metrics["ratio_max"])
            metrics |= {f"ratio_{name}": value for name, value in quantiles.items()}
        if total["band_tokens"]:
            metrics["outside_band_fraction"] = total["outside_band"] / total["band_tokens"]
        if total["fresh_band_tokens"]:
            metrics["engine_outside_band_fraction"] = total["fresh_outside_band"] / total["fresh_band_tokens"]
        metrics |= {
            f"distance_lag_{name}": distance / number
            for name, distance, number in zip(LAG_BUCKETS, distances, numbers, strict=True)
            if number
        }
        if total["behaviour_tokens"]:
            metrics["kl_behaviour"] = total["kl_behaviour"] / total["behaviour_tokens"]
        if total["teacher_tokens"]:
            metrics["kl_teacher"] = total["kl_teacher"] / total["teacher_tokens"]
        return metrics | {
            "clip_fraction_low": total["clipped_low"] / total["tokens"],
            "clip_fraction_high": total["clipped_high"] / total["tokens"],
            "kl_reference": total["kl_reference"] / total["tokens"],
            "entropy": total["entropy"] / total["tokens"],
        }


def _parts(values: list[float]) -> tuple[list[float], list[float], list[float]]:
    """Split what follows ``SUMS``: the histogram, and two values for each range of lags."""
    size = len(LAG_BUCKETS)
    return values[: -2 * size], values[-2 * size : -size], values[-size:]


def _where(mask: Tensor, values: Tensor, otherwise: float = 0.0) -> Tensor:
    """Replace values outside a mask. Indexing with the mask would make the trainer wait for the GPU."""
    return torch.where(mask, values.double(), otherwise)


def _max(mask: Tensor, values: Tensor) -> Tensor:
    """Return the largest value inside a mask, or -inf if there is none."""
    return _inside(mask, values).max()


def _percentiles(mask: Tensor, values: Tensor) -> Tensor:
    """Return the values that 5 % and 1 % of those inside a mask exceed, or -inf if there are fewer than 100."""
    descending, count = _inside(mask, values).sort(descending=True).values, mask.sum()
    found = descending.gather(0, torch.stack([count // 20, count // 100]))
    return torch.where(count < 100, -torch.inf, found)


def _inside(mask: Tensor, values: Tensor) -> Tensor:
    """Return the values as a vector, with -inf for those outside a mask and at its end."""
    lowest = torch.full((1,), -torch.inf, dtype=torch.float64, device=values.device)
    return torch.cat([_where(mask, values, -torch.inf).flatten(), lowest])
