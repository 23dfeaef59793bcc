"""The advantages of a rollout, from the scores of all ranks."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor

from lgrpo.advantages import Advantage, Scores
from lgrpo.functional import stream_uniform
from lgrpo.types import RolloutBatch


def set_advantages(batch: RolloutBatch, advantage: Advantage, seed: int, trainer: L.Trainer) -> None:
    """Every rank sees the scores of all, so that statistics of the whole rollout are right; each keeps its own part."""
    size = len(batch)
    siblings = torch.arange(size) % batch.group_size
    draws = stream_uniform(seed, batch.positions, siblings, -1)  # tokens draw from 0 on
    own = torch.stack([batch.rewards.double(), batch.completion_mask.sum(1).double(), draws])
    everyone: Any = trainer.lightning_module.all_gather(own.to(trainer.strategy.root_device))
    rewards, lengths, draws = everyone.view(-1, 3, size).transpose(0, 1).reshape(3, -1).cpu()
    # float64: the mean of equal rewards is then that reward to the last bit, and their advantage 0
    known = ~rewards.view(-1, batch.group_size).isnan().any(1).repeat_interleave(batch.group_size)
    advantages = torch.zeros_like(rewards)
    if bool(known.any()):
        scores = Scores(rewards=rewards[known], lengths=lengths[known], draws=draws[known], group_size=batch.group_size)
        advantages[known] = _checked(advantage, advantage(scores), scores)
    first = trainer.global_rank * size
    own_advantages = advantages[first : first + size].float()
    batch.advantages = torch.where(batch.completion_mask, own_advantages[:, None], 0.0)


def _checked(advantage: Advantage, advantages: Tensor, scores: Scores) -> Tensor:
    if advantages.shape != scores.rewards.shape or not bool(advantages.isfinite().all()):
        raise ValueError(
            f"{type(advantage).__name__} returned {tuple(advantages.shape)} advantages for {len(scores.rewards)} "
            f"completions, {int((~advantages.isfinite()).sum())} of them not finite"
        )
    return advantages
