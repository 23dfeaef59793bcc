"""Gradient norm, learning rate, memory and throughput, which every run logs."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from lgrpo import ClippedLoss, GRPOModule, RolloutCallback
from lgrpo.losses import ComposedLoss
from tests.helpers import build, fit, largest_difference


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(
    "clip",
    [
        {},
        {"gradient_clip_val": 1e-3},
        {"gradient_clip_val": 1e-3, "precision": "bf16-mixed"},
        {"gradient_clip_val": 1e-4, "gradient_clip_algorithm": "value"},
    ],
    ids=["none", "norm", "bf16", "value"],
)
def test_norm_before_clipping(clip, accumulate):
    """The recorder sees the gradients of whole steps, before they are clipped."""
    run = fit(rollouts=3, trainer={"accumulate_grad_batches": accumulate} | clip)
    expected = [torch.cat([g.flatten() for g in step.values()]).norm().item() for step in run.recorder.gradients]
    assert [row["train/grad_norm"] for row in run.logged] == pytest.approx(expected, rel=1e-5)
    assert min(expected) > 1e-2


def test_gradients_are_clipped_as_by_lightning(monkeypatch):
    trainer = {"gradient_clip_val": 1e-3, "accumulate_grad_batches": 2}
    ours, free = fit(rollouts=3, trainer=trainer).weights, fit(rollouts=3).weights
    monkeypatch.delattr(GRPOModule, "configure_gradient_clipping")
    assert largest_difference(ours, fit(rollouts=3, trainer=trainer).weights) == 0
    assert largest_difference(ours, free) > 1e-4


class Nothing(RolloutCallback):
    """Take rollout 1 out of the loss."""

    def on_rollout_end(self, trainer, pl_module, batch):
        batch.loss_mask &= batch.rollout != 1


def test_a_skipped_step_has_norm_0():
    norms = [row["train/grad_norm"] for row in fit(rollouts=3, callbacks=[Nothing()]).logged]
    assert (norms[0] > 0, norms[1], norms[2] > 0) == (True, 0, True)


def test_learning_rate_of_the_step():
    run = build(rollouts=3)
    run.module.scheduler = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    run.trainer.fit(run.module, datamodule=run.data)
    assert [row["train/learning_rate"] for row in run.logged] == pytest.approx([1e-2, 5e-3, 2.5e-3])


def test_memory_and_throughput():
    run = fit(rollouts=3)
    assert all(0.05 < row["memory/resident"] < 64 for row in run.logged)
    assert [row.get("time/tokens_per_second", 0) > 0 for row in run.logged] == [False, True, True]


def test_share_outside_the_band():
    """Off-policy, more tokens are outside a narrow band than are clipped; without a gate there is no band."""
    narrow = fit(v=4, rollouts=4, loss=ClippedLoss(0.02, 0.02), learning_rate=0.1).logged[-1]
    clipped = narrow["train/clip_fraction_low"] + narrow["train/clip_fraction_high"]
    assert 0 < clipped < narrow["train/outside_band_fraction"] < 1
    assert narrow["train/ratio_min"] <= narrow["train/ratio_q01"] <= narrow["train/ratio_q50"]
    assert narrow["train/ratio_q50"] <= narrow["train/ratio_q99"] <= narrow["train/ratio_max"]
    assert "train/outside_band_fraction" not in fit(rollouts=1, loss=ComposedLoss()).logged[0]
