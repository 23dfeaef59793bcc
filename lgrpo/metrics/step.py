"""What an optimizer step did, added up over its micro-batches and ranks."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric

_SUMS = (
    "loss",
    "tokens",
    "sequences",
    "ratio",
    "ratio_squared",
    "clipped_low",
    "clipped_high",
    "kl_behaviour",
    "kl_reference",
    "entropy",
    "lag",
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
    ) -> None:
        """Adds a micro-batch. [B, T] tensors count where ``mask`` is set; ``log_ratio`` is log π_θ/π_α."""
        live = mask.any(1)
        all_log_ratios, ratio, log_ratio = log_ratio, ratio[mask].double(), log_ratio[mask].double()
        kl_behaviour = log_ratio.exp() - 1 - log_ratio  # k3 of KL(π_α ‖ π_θ): tokens are α's own
        mismatch = (
            all_log_ratios[mask & (lag == 0)[:, None]].double().abs()
        )  # α is π_θ there, computed by another engine
        values = (
            loss.double(),
            mask.sum(),
            live.sum(),
            ratio.sum(),
            ratio.square().sum(),
            clipped_low[mask].sum(),
            clipped_high[mask].sum(),
            kl_behaviour.sum(),
            torch.zeros(()) if kl_reference is None else kl_reference[mask].sum(),
            entropy[mask].sum(),
            lag[live].sum(),
            mismatch.numel(),
            mismatch.sum(),
        )
        self.sums += torch.stack([torch.as_tensor(value).to(self.sums) for value in values])
        if len(ratio):
            worst = mismatch.max() if len(mismatch) else ratio.new_tensor(-torch.inf)
            largest = torch.stack([ratio.max(), -ratio.min(), lag[live].max().double(), worst])
            self.maxima = torch.maximum(self.maxima, largest)

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
        return figures | {
            "lag": total["lag"] / total["sequences"],
            "lag_max": lag_max,
            "ratio_mean": mean["ratio"],
            "ratio_std": max(mean["ratio_squared"] - mean["ratio"] ** 2, 0.0) ** 0.5,
            "ratio_min": -minus_ratio_min,
            "ratio_max": ratio_max,
            "clip_fraction_low": mean["clipped_low"],
            "clip_fraction_high": mean["clipped_high"],
            "kl_behaviour": mean["kl_behaviour"],
            "kl_reference": mean["kl_reference"],
            "entropy": mean["entropy"],
        }
