"""Stop and go on: from every optimizer step of two cycles, the end is the same to the bit."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lgrpo import ClippedLoss, ReferenceRefresh, ZeroVarianceMask
from lgrpo.callbacks import ExactResume
from tests.helpers import fit, largest_difference

SETTINGS = {"v": 3, "i": 2, "rollouts": 3, "epochs": 2, "learning_rate": 0.5}
STEPS = 12


def settings(folder, loss, save=False):
    callbacks = [ZeroVarianceMask(0.2), ReferenceRefresh(period=2, decay=0.5), ExactResume()]
    if save:
        callbacks.append(ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1))
    trainer = {"accumulate_grad_batches": 2, "enable_checkpointing": save, "default_root_dir": str(folder)}
    return SETTINGS | {"loss": loss, "callbacks": callbacks, "trainer": trainer}


@pytest.mark.parametrize("centre", ["one", "proximal"])
def test_from_every_step(tmp_path, centre):
    """With a proximal centre the log-probabilities of the first pass must come along too."""

    def loss():
        return ClippedLoss(0.05, 0.05, centre=centre, kl_coef=0.1)

    straight = fit(**settings(tmp_path, loss(), save=True))
    assert straight.trainer.global_step == STEPS
    for step in range(1, STEPS):
        checkpoint = tmp_path / f"step={step}.ckpt"
        torch.load(checkpoint, weights_only=True)
        run = fit(**settings(tmp_path, loss()), ckpt_path=str(checkpoint))
        assert run.trainer.global_step == STEPS
        assert largest_difference(straight.weights, run.weights) == 0, f"from step {step}"
        assert run.recorder.lags == straight.recorder.lags[step:], f"from step {step}"
        sampled = run.recorder.rollouts
        expected = straight.recorder.rollouts[len(straight.recorder.rollouts) - len(sampled) :]
        assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(sampled, expected, strict=True))
