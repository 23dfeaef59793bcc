"""The advantages of a rollout, from the scores of all ranks."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch

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
    scores = Scores(rewards=rewards, lengths=lengths, draws=draws, group_size=batch.group_size)
    advantages = advantage(scores)
    if advantages.shape != rewards.shape or not bool(advantages.isfinite().all()):
        raise ValueError(
            f"{type(advantage).__name__} returned {tuple(advantages.shape)} advantages for {len(rewards)} "
            f"completions, {int((~advantages.isfinite()).sum())} of them not finite"
        )
    first = trainer.global_rank * size
    own_advantages = advantages[first : first + size].float()
    batch.advantages = torch.where(batch.completion_mask, own_advantages[:, None], 0.0)
