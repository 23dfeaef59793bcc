"""The figures of a rollout over all ranks: denominators for the loss, means for the log."""

from __future__ import annotations

import lightning as L
import torch

from lgrpo.functional import has_reward_variance
from lgrpo.types import RolloutBatch, StepTotals


def fill_totals(batch: RolloutBatch, trainer: L.Trainer) -> None:
    """Sets ``totals`` and completes ``metrics``, all of them in one collective. The masks must be final."""
    varied = has_reward_variance(batch.rewards, batch.group_size)
    local = {
        "all_tokens": batch.completion_mask.sum(),
        "live_tokens": batch.loss_mask.sum(),
        "all_sequences": batch.completion_mask.any(1).sum(),
        "live_sequences": batch.loss_mask.any(1).sum(),
        "reward": batch.rewards.sum(),
        "reward_squared": batch.rewards.double().square().sum(),
        "zero_variance": (~varied).sum(),
        "truncated": batch.truncated.sum(),
        "ranks": torch.tensor(1),
        **{name: torch.tensor(value) for name, value in batch.metrics.items()},
    }
    vector = torch.stack([value.double() for value in local.values()]).to(trainer.strategy.root_device)
    summed = trainer.strategy.reduce(vector, reduce_op="sum")
    assert isinstance(summed, torch.Tensor)
    total = dict(zip(local, summed.tolist(), strict=True))
    batch.totals = StepTotals(**{name: total[name] for name in StepTotals.__slots__})
    count = total["all_sequences"]
    mean = total["reward"] / count
    batch.metrics = {
        "rollout/reward": mean,
        "rollout/reward_std": max(total["reward_squared"] / count - mean**2, 0.0) ** 0.5,
        "rollout/zero_variance_fraction": total["zero_variance"] / count,
        "rollout/completion_length": total["all_tokens"] / count,
        "rollout/truncated_fraction": total["truncated"] / count,
        "rollout/live_fraction": total["live_sequences"] / count,
        **{name: total[name] / total["ranks"] for name in batch.metrics},
    }
