"""Validation every n rollouts."""

from __future__ import annotations

import lightning as L

from lgrpo.checks import check_count
from lgrpo.hooks import rollout_owner


class ValidateEvery(L.Callback):
    """Validates after every n rollouts, counted across stages, instead of at the end of each stage."""

    def __init__(self, rollouts: int) -> None:
        """
        Args:
            rollouts: Number of rollouts between two validations.
        """
        check_count("validate_every.rollouts", rollouts, at_least=1)
        self.rollouts = rollouts

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit":
            per_rollout = rollout_owner(trainer).reuse * trainer.accumulate_grad_batches
            trainer.val_check_interval = self.rollouts * per_rollout
            trainer.check_val_every_n_epoch = None
