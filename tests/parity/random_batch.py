"""Rollouts made of given log-probabilities, and losses with their gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from lgrpo.losses import PolicyLogprobs, PolicyLoss
from lgrpo.types import RolloutBatch, StepTotals


def rollout(behaviour: Tensor, mask: Tensor, advantages: Tensor, group_size: int = 4) -> RolloutBatch:
    """Return completions without prompts: index t of every tensor is the t-th sampled token."""
    mask = mask.bool()
    tokens, sequences = float(mask.sum()), float(mask.any(1).sum())
    return RolloutBatch(
        tokens=torch.zeros(mask.shape, dtype=torch.int64),
        attention_mask=mask,
        completion_mask=mask,
        loss_mask=mask.clone(),
        behaviour_logprobs=torch.where(mask, behaviour, 0.0),
        rewards=torch.zeros(len(mask)),
        advantages=torch.where(mask, advantages[:, None], 0.0),
        behaviour_step=torch.zeros(len(mask), dtype=torch.int64),
        positions=torch.arange(len(mask)) // group_size,
        truncated=torch.zeros(len(mask), dtype=torch.bool),
        failed=torch.zeros(len(mask), dtype=torch.bool),
        rows=torch.arange(len(mask)),
        group_size=group_size,
        temperature=1.0,
        max_tokens=mask.shape[1],
        rollout=0,
        zero_variance=torch.zeros(len(mask), dtype=torch.bool),
        totals=StepTotals(all_tokens=tokens, live_tokens=tokens, all_sequences=sequences, live_sequences=sequences),
    )


def loss_and_gradient(
    loss: PolicyLoss,
    batch: RolloutBatch,
    policy: Tensor,
    proximal: Tensor | None = None,
    reference: Tensor | None = None,
    step: int = 0,
    entropy: Tensor | None = None,
) -> tuple[float, Tensor]:
    """Return the loss and its gradient with respect to the policy's log-probabilities."""
    mask = batch.completion_mask
    leaf = policy.clone().requires_grad_()

    def outside_is_zero(values: Tensor | None) -> Tensor | None:
        return None if values is None else torch.where(mask, values, 0.0)

    logprobs = PolicyLogprobs(
        policy=torch.where(mask, leaf, 0.0),
        entropy=torch.zeros_like(leaf) if entropy is None else torch.where(mask, entropy, 0.0),
        proximal=outside_is_zero(proximal),
        reference=outside_is_zero(reference),
        step=step,
    )
    value = loss(batch, logprobs).loss
    value.backward()
    assert leaf.grad is not None
    return float(value.detach()), leaf.grad
