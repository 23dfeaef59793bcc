"""Advantages of a rollout, from the rewards of all ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lgrpo.advantages import Advantage, Scores
from lgrpo.data.micro_batches import TokenBudget, micro_batches
from lgrpo.functional import completion_log_ratio, has_reward_variance, stream_uniform, turn_indices
from lgrpo.hooks import policy_owner, rollout_owner
from lgrpo.types import RolloutBatch


def set_advantages(
    batch: RolloutBatch, advantage: Advantage, seed: int, trainer: L.Trainer, budget: TokenBudget | None = None
) -> None:
    """Set ``batch.advantages``. Every rank sees the scores of all, so that statistics cover the whole rollout."""
    size = len(batch)
    siblings = torch.arange(size) % batch.group_size
    own = {
        "rewards": batch.rewards,
        "lengths": batch.completion_mask.sum(1),
        "draws": stream_uniform(seed, batch.positions, siblings, -1),  # sampled tokens use the indices from 0 on
    }
    if advantage.needs_log_ratios:
        own["log_ratios"] = _log_ratios(batch, advantage, trainer, budget)
    if advantage.needs_parts:
        own["parts"] = _parts(batch, advantage)
    if advantage.needs_turns:
        own["turn_rewards"] = _turn_rewards(batch, advantage, trainer)
    gathered = _gathered(own, trainer)
    known = ~gathered["rewards"].view(-1, batch.group_size).isnan().any(1).repeat_interleave(batch.group_size)
    shape = gathered["turn_rewards" if advantage.needs_turns else "rewards"].shape
    advantages = torch.zeros(shape, dtype=torch.float64)
    if bool(known.any()):
        scores = {name: values[known] for name, values in gathered.items()}
        advantages[known] = _checked(advantage, Scores(**scores, group_size=batch.group_size), advantages[known].shape)
    if advantage.needs_turns:
        has_signal = (advantages != 0)[~gathered["turn_rewards"].isnan() & known[:, None]].double()
        batch.metrics["rollout/turn_signal_fraction"] = float(has_signal.mean()) if len(has_signal) else 0.0
    first = trainer.global_rank * size
    batch.advantages = _at_tokens(advantages[first : first + size].float(), batch.completion_mask)
    batch.zero_variance = ~has_reward_variance(batch.rewards, batch.group_size) & batch.is_known


def _at_tokens(advantages: Tensor, sampled: Tensor) -> Tensor:
    """Return advantages of completions [B] or turns [B, N] at the tokens [B, T] that were sampled, 0 elsewhere."""
    if advantages.ndim == 1:
        return torch.where(sampled, advantages[:, None], 0.0)
    return torch.where(sampled, advantages.gather(1, turn_indices(sampled).clamp(min=0)), 0.0)


def _gathered(own: dict[str, Tensor], trainer: L.Trainer) -> dict[str, Tensor]:
    """Return the rows [B, …] of all ranks, with one collective.

    In float64 the mean of equal rewards is exactly that reward, and their advantage 0.
    """
    flat = {
        name: values.double().flatten(1) if values.ndim > 1 else values.double()[:, None]
        for name, values in own.items()
    }
    joined = torch.cat([*flat.values()], 1)
    gathered: Any = trainer.lightning_module.all_gather(joined.to(trainer.strategy.root_device))
    parts = gathered.view(-1, joined.shape[1]).cpu().split([values.shape[1] for values in flat.values()], 1)
    return {name: part.reshape(-1, *own[name].shape[1:]) for name, part in zip(own, parts, strict=True)}


def _checked(advantage: Advantage, scores: Scores, shape: torch.Size) -> Tensor:
    """Return the advantages of some scores; raise an error if they are not finite or have another shape."""
    values = advantage(scores)
    if values.shape != shape or not bool(values.isfinite().all()):
        raise ValueError(
            f"{type(advantage).__name__} returned {tuple(values.shape)} advantages for {len(scores.rewards)} "
            f"completions, {int((~values.isfinite()).sum())} of them not finite"
        )
    return values


def _log_ratios(batch: RolloutBatch, advantage: Advantage, trainer: L.Trainer, budget: TokenBudget | None) -> Tensor:
    """Return log π_k/π_α of each completion [B], with π_k the policy before this rollout's updates."""
    found = torch.zeros(len(batch), dtype=torch.float64)
    is_read = batch.completion_mask & batch.is_known[:, None]
    for piece in micro_batches(replace(batch, loss_mask=is_read), trainer, budget):
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


def _turn_rewards(batch: RolloutBatch, advantage: Advantage, trainer: L.Trainer) -> Tensor:
    """Return the environment's reward of each turn, with its weight, [B, N]; NaN for turns that do not exist.

    N is the same on all ranks. A completion without tokens has one turn: its reward counts for its siblings.
    """
    if batch.turn_rewards is None:
        raise ValueError(
            f"{type(advantage).__name__} needs the rewards of turns, but no completion is an episode: sample with "
            "data.engine: lgrpo.engines.EnvironmentEngine, or use another advantage"
        )
    turns = turn_indices(batch.completion_mask)
    last = turns.amax(1, keepdim=True).clamp(min=0)
    largest: Any = last.max().to(trainer.strategy.root_device)
    if trainer.world_size > 1:
        largest = trainer.strategy.reduce(largest, reduce_op="max")
    found = torch.zeros(len(batch), int(largest) + 1, dtype=torch.float64)
    own = torch.where(batch.completion_mask, batch.turn_rewards, 0.0).double()
    found.scatter_add_(1, turns.clamp(min=0), own * rollout_owner(trainer).task.reward.turn_weight)
    return torch.where(torch.arange(found.shape[1]) <= last, found, torch.nan)
