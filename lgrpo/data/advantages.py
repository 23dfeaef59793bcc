"""Advantages of a rollout, from the rewards of all ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lgrpo.advantages import Advantage, Scores
from lgrpo.functional import completion_log_ratio, has_reward_variance, stream_uniform
from lgrpo.hooks import policy_owner
from lgrpo.types import RolloutBatch


def set_advantages(batch: RolloutBatch, advantage: Advantage, seed: int, trainer: L.Trainer) -> None:
    """Set ``batch.advantages``. Every rank sees the scores of all, so that statistics cover the whole rollout."""
    size = len(batch)
    siblings = torch.arange(size) % batch.group_size
    draws = stream_uniform(seed, batch.positions, siblings, -1)  # sampled tokens use the indices from 0 on
    columns = [batch.rewards.double(), batch.completion_mask.sum(1).double(), draws]
    if advantage.needs_log_ratios:
        columns.append(_log_ratios(batch, advantage, trainer))
    if advantage.needs_parts:
        columns += [*_parts(batch, advantage).double().flatten(1).unbind(1)]
    own = torch.stack(columns)
    gathered: Any = trainer.lightning_module.all_gather(own.to(trainer.strategy.root_device))
    rewards, lengths, draws, *rest = gathered.view(-1, len(own), size).transpose(0, 1).reshape(len(own), -1).cpu()
    # in float64 the mean of equal rewards is exactly that reward, and their advantage 0
    known = ~rewards.view(-1, batch.group_size).isnan().any(1).repeat_interleave(batch.group_size)
    advantages = torch.zeros_like(rewards)
    if bool(known.any()):
        scores = Scores(
            rewards=rewards[known],
            lengths=lengths[known],
            draws=draws[known],
            group_size=batch.group_size,
            log_ratios=rest.pop(0)[known] if advantage.needs_log_ratios else None,
            parts=torch.stack(rest, 1).unflatten(1, (2, -1))[known] if advantage.needs_parts else None,
        )
        values = advantage(scores)
        if values.shape != scores.rewards.shape or not bool(values.isfinite().all()):
            raise ValueError(
                f"{type(advantage).__name__} returned {tuple(values.shape)} advantages for {len(scores.rewards)} "
                f"completions, {int((~values.isfinite()).sum())} of them not finite"
            )
        advantages[known] = values
    first = trainer.global_rank * size
    own_advantages = advantages[first : first + size].float()
    batch.advantages = torch.where(batch.completion_mask, own_advantages[:, None], 0.0)
    batch.zero_variance = ~has_reward_variance(batch.rewards, batch.group_size) & batch.is_known


def _log_ratios(batch: RolloutBatch, advantage: Advantage, trainer: L.Trainer) -> Tensor:
    """Return log π_k/π_α of each completion [B], with π_k the policy before this rollout's updates."""
    found = torch.zeros(len(batch), dtype=torch.float64)
    for piece in replace(batch, loss_mask=batch.completion_mask).split(trainer.accumulate_grad_batches):
        log_ratio = policy_owner(trainer).policy_logprobs(piece) - piece.behaviour_logprobs
        found[piece.rows] = completion_log_ratio(log_ratio, piece.completion_mask)
    if bool(found.isnan().any()):
        raise ValueError(
            f"{type(advantage).__name__} compares the policy with the one that sampled, but recorded completions have "
            "no log-probabilities: record them (RolloutRecorder does), or use another advantage"
        )
    return found


def _parts(batch: RolloutBatch, advantage: Advantage) -> Tensor:
    """Return each reward of a sum and its weight, [B, 2, K]; a reward that is not a sum is its only part."""
    if batch.reward_parts is not None:
        return batch.reward_parts
    if bool(batch.is_recorded.any()):
        raise ValueError(
            f"{type(advantage).__name__} needs each reward of a sum, but a recording has only the sum: have the task "
            "score the completions (data.engine.rewards: task), or use another advantage"
        )
    return torch.stack([batch.rewards, torch.ones_like(batch.rewards)], 1)[:, :, None]
