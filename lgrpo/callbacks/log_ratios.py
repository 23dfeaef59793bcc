"""Log-ratios of the current policy to the behaviour policy over a whole rollout."""

from __future__ import annotations

import lightning as L
import torch
from torch import Tensor

from lgrpo.hooks import policy_owner
from lgrpo.types import RolloutBatch


@torch.no_grad()
def log_ratios(trainer: L.Trainer, batch: RolloutBatch) -> Tensor:
    """Return log π_θ/π_α [B, T] of a rollout, with the current π_θ; 0 outside the completions.

    The forward pass runs in ``trainer.accumulate_grad_batches`` pieces.
    """
    policy, ratios = policy_owner(trainer), torch.zeros_like(batch.behaviour_logprobs)
    for rows in torch.arange(len(batch)).chunk(trainer.accumulate_grad_batches):
        piece = batch.select(rows)
        ratios[rows, : piece.tokens.shape[1]] = policy.policy_logprobs(piece) - piece.behaviour_logprobs
    return torch.where(batch.completion_mask, ratios, 0.0)
