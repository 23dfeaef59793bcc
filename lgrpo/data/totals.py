"""The figures of a rollout over all ranks: denominators for the loss, means for the log."""

from __future__ import annotations

import lightning as L
import torch

from lgrpo.functional import has_reward_variance
from lgrpo.types import RolloutBatch, StepTotals


def fill_totals(batch: RolloutBatch, trainer: L.Trainer) -> None:
    """Sets ``totals`` and completes ``metrics``, all of them in one collective. The masks must be final."""
    known = batch.is_known
    sampled, rewards = batch.completion_mask[known], batch.rewards[known].double()
    of_groups = rewards.view(-1, batch.group_size).mean(1)
    local = {
        "all_tokens": sampled.sum(),
        "live_tokens": batch.loss_mask.sum(),
        "all_sequences": sampled.any(1).sum(),
        "live_sequences": batch.loss_mask.any(1).sum(),
        "reward": rewards.sum(),
        "reward_squared": rewards.square().sum(),
        "groups": torch.tensor(len(of_groups)),
        "group_reward_squared": of_groups.square().sum(),
        "zero_variance": (~has_reward_variance(batch.rewards[known], batch.group_size)).sum(),
        "truncated": batch.truncated[known].sum(),
        "recorded": batch.is_recorded[known].sum(),
        "ranks": torch.tensor(1),
        **{name: torch.tensor(value) for name, value in _moments(batch.metrics).items()},
    }
    vector = torch.stack([value.double() for value in local.values()]).to(trainer.strategy.root_device)
    summed = trainer.strategy.reduce(vector, reduce_op="sum")
    assert isinstance(summed, torch.Tensor)
    total = dict(zip(local, summed.tolist(), strict=True))
    batch.totals = StepTotals(**{name: total[name] for name in StepTotals.__slots__})
    figures = _deviations({name: total[name] / total["ranks"] for name in batch.metrics})
    count = max(total["all_sequences"], 1)  # none, where every score is late
    mean, groups = total["reward"] / count, total["groups"]
    between = max(total["group_reward_squared"] / max(groups, 1) - mean**2, 0.0)
    batch.metrics = {
        "rollout/reward": mean,
        "rollout/reward_std": max(total["reward_squared"] / count - mean**2, 0.0) ** 0.5,
        "rollout/reward_stderr": (between / max(groups - 1, 1)) ** 0.5,
        "rollout/zero_variance_fraction": total["zero_variance"] / count,
        "rollout/completion_length": total["all_tokens"] / count,
        "rollout/truncated_fraction": total["truncated"] / count,
        "rollout/live_fraction": total["live_sequences"] / count,
        **figures,
    }
    if total["recorded"]:
        batch.metrics["rollout/recorded_fraction"] = total["recorded"] / count


def _moments(figures: dict[str, float]) -> dict[str, float]:
    """Deviations as mean squares, which can be averaged over ranks."""
    return {
        name: value**2 + figures[name.removesuffix("_std")] ** 2 if _is_deviation(name, figures) else value
        for name, value in figures.items()
    }


def _deviations(figures: dict[str, float]) -> dict[str, float]:
    """The inverse."""
    return {
        name: max(value - figures[name.removesuffix("_std")] ** 2, 0.0) ** 0.5
        if _is_deviation(name, figures)
        else value
        for name, value in figures.items()
    }


def _is_deviation(name: str, figures: dict[str, float]) -> bool:
    return name.endswith("_std") and name.removesuffix("_std") in figures
