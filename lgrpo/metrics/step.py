"""What an optimizer step did, added up over its micro-batches and ranks."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric

_SUMS = (
    "loss",
    "tokens",
    "ratio",
    "ratio_squared",
    "clipped_low",
    "clipped_high",
    "kl_behaviour",
    "kl_reference",
    "entropy",
    "lag",
    "aged_sequences",
    "ratio_tokens",
    "behaviour_tokens",
    "fresh_tokens",
    "mismatch",
)


class StepMetrics(Metric):
    """Means over the live tokens of one optimizer step. Two collectives, whatever the number of figures."""

    full_state_update = False

    sums: Tensor
    maxima: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("sums", default=torch.zeros(len(_SUMS), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("maxima", default=torch.full((4,), -torch.inf, dtype=torch.float64), dist_reduce_fx="max")

    @torch.no_grad()
    def update(
        self,
        *,
        loss: Tensor,
        mask: Tensor,
        log_ratio: Tensor,
        ratio: Tensor,
        clipped_low: Tensor,
        clipped_high: Tensor,
        entropy: Tensor,
        kl_reference: Tensor | None,
        lag: Tensor,
        behaviour_known: Tensor,
    ) -> None:
        """Adds a micro-batch. [B, T] tensors count where ``mask`` is set; ``log_ratio`` is log π_θ/π_α.

        What a recording does not tell has no figure: ``lag`` is NaN for its completions, and what is made of log π_α
        counts only where ``behaviour_known`` is set.
        """
        live = mask.any(1)
        has_lag, is_known = live & ~lag.isnan(), mask & behaviour_known
        has_ratio, is_fresh = mask & (behaviour_known | ~ratio.isnan()), mask & (lag == 0)[:, None]
        log_ratio_known = _where(is_known, log_ratio)
        kl_behaviour = log_ratio_known.exp() - 1 - log_ratio_known  # k3 of KL(π_α ‖ π_θ): tokens are α's own
        mismatch = log_ratio.abs()  # where they are fresh α is π_θ, computed by another engine
        ratio_known = _where(has_ratio, ratio)
        values = (
            loss,
            mask.sum(),
            ratio_known.sum(),
            ratio_known.square().sum(),
            _where(mask, clipped_low).sum(),
            _where(mask, clipped_high).sum(),
            kl_behaviour.sum(),
            loss.new_zeros(()) if kl_reference is None else _where(mask, kl_reference).sum(),
            _where(mask, entropy).sum(),
            _where(has_lag, lag).sum(),
            has_lag.sum(),
            has_ratio.sum(),
            is_known.sum(),
            is_fresh.sum(),
            _where(is_fresh, mismatch).sum(),
        )
        self.sums += torch.stack([value.double() for value in values])
        pairs = (has_ratio, ratio), (has_ratio, -ratio), (has_lag, lag), (is_fresh, mismatch)
        nothing = self.maxima.new_full((1,), -torch.inf)
        largest = [torch.cat([_where(some, each, -torch.inf).flatten(), nothing]).max() for some, each in pairs]
        self.maxima = torch.maximum(self.maxima, torch.stack(largest))

    def compute(self) -> dict[str, float]:
        total = dict(zip(_SUMS, self.sums.tolist(), strict=True))
        figures = {"loss": total["loss"], "live_tokens": total["tokens"]}
        if not total["tokens"]:
            return figures
        mean = {name: total[name] / total["tokens"] for name in _SUMS}
        ratio_max, minus_ratio_min, lag_max, mismatch_max = self.maxima.tolist()
        if total["fresh_tokens"]:
            figures["engine_mismatch_mean"] = total["mismatch"] / total["fresh_tokens"]
            figures["engine_mismatch_max"] = mismatch_max
        if total["aged_sequences"]:
            figures |= {"lag": total["lag"] / total["aged_sequences"], "lag_max": lag_max}
        if total["ratio_tokens"]:
            ratio_mean, square = (total[name] / total["ratio_tokens"] for name in ("ratio", "ratio_squared"))
            figures |= {
                "ratio_mean": ratio_mean,
                "ratio_std": max(square - ratio_mean**2, 0.0) ** 0.5,
                "ratio_min": -minus_ratio_min,
                "ratio_max": ratio_max,
            }
        if total["behaviour_tokens"]:
            figures["kl_behaviour"] = total["kl_behaviour"] / total["behaviour_tokens"]
        return figures | {
            "clip_fraction_low": mean["clipped_low"],
            "clip_fraction_high": mean["clipped_high"],
            "kl_reference": mean["kl_reference"],
            "entropy": mean["entropy"],
        }


def _where(mask: Tensor, values: Tensor, otherwise: float = 0.0) -> Tensor:
    """Values where a mask is set. To pick them out would make the trainer wait for a GPU to count them."""
    return torch.where(mask, values.double(), otherwise)
