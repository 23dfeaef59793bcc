"""How much the policy's log-probabilities depend on which rows are computed together."""

from __future__ import annotations

from dataclasses import replace

import lightning as L
import torch

from lgrpo.hooks import policy_owner, rollout_owner
from lgrpo.losses import PolicyLogprobs
from lgrpo.metrics import StepMetrics


@torch.no_grad()
def self_mismatch(trainer: L.Trainer) -> dict[str, float]:
    """Compare the policy with itself: a micro-batch in one piece, and in two halves.

    Returns what is logged about the engine, without ``engine_``: ``mismatch_mean``, ``mismatch_p95``, ``mismatch_p99``,
    ``mismatch_max`` and, if the loss has a band, ``outside_band_fraction``, over all sampled tokens of the first
    micro-batch of each rank. All ranks must call it.
    """
    owner, step = policy_owner(trainer), trainer.global_step
    batch = rollout_owner(trainer).micro_batches[0]
    whole = owner.policy_logprobs(batch)
    rows = torch.arange(len(batch))
    halves = torch.zeros_like(whole)
    for half in (rows[: (len(rows) + 1) // 2], rows[len(rows) // 2 :]):  # one row: twice, as many calls on every rank
        piece = batch.select(half)
        halves[half, : piece.tokens.shape[1]] = owner.policy_logprobs(piece)
    as_fresh = replace(
        batch, behaviour_logprobs=halves, behaviour_step=torch.full_like(batch.positions, step), metrics={}
    )
    as_fresh.loss_mask = batch.completion_mask
    nothing = torch.zeros_like(whole)
    logprobs = PolicyLogprobs(
        policy=whole, entropy=nothing, proximal=halves, reference=whole, teacher_kl=nothing, step=step
    )
    metrics = StepMetrics()
    metrics.update(**owner.loss(as_fresh, logprobs).quantities(as_fresh, logprobs))
    found = metrics.to(trainer.strategy.root_device).compute()
    return {name.removeprefix("engine_"): value for name, value in found.items() if name.startswith("engine_")}
