"""Behaviour log-probabilities by the policy, while it still is the behaviour policy."""

from __future__ import annotations

from collections.abc import Sequence

import lightning as L

from lgrpo.hooks import policy_owner
from lgrpo.types import RolloutBatch


def recompute_logprobs(batch: RolloutBatch, waiting: Sequence[RolloutBatch], trainer: L.Trainer) -> None:
    """log π_α by the policy, of this rollout and of those waiting that were sampled from the same weights.

    This one's are computed in the very pieces that will be trained on: its ratio starts at exactly 1.
    """
    step = trainer.global_step
    if batch.logprobs_from == "policy":  # with the first of its cycle
        return
    if (sampled_at := int(batch.behaviour_step.min())) != step:
        raise ValueError(
            f"data.behaviour_logprobs is 'policy', but rollout {batch.rollout} was sampled with the weights of "
            f"step {sampled_at} and the policy is at step {step} already. With weight_sync.period above 1 set "
            "data.generate_ahead, so that a cycle's are computed before its first step, or use 'engine'"
        )
    ahead = [other for other in waiting if int(other.behaviour_step.min()) == step]
    for rollout in [batch, *(other for other in ahead if other.rollout != batch.rollout)]:
        for piece in rollout.split(trainer.accumulate_grad_batches):
            width = piece.tokens.shape[1]
            rollout.behaviour_logprobs[piece.rows, :width] = policy_owner(trainer).policy_logprobs(piece)
        rollout.logprobs_from = "policy"
