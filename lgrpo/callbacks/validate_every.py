"""When a run is validated, counted in rollouts."""

from __future__ import annotations

import lightning as L
from jsonargparse.typing import PositiveInt

from lgrpo.hooks import rollout_owner


class ValidateEvery(L.Callback):
    """Validates after every n rollouts, over the bounds of stages; not at the end of a stage any more."""

    def __init__(self, rollouts: PositiveInt) -> None:
        """
        Args:
            rollouts: n.
        """
        if rollouts < 1:
            raise ValueError(f"validate_every.rollouts is {rollouts}; it counts rollouts, 1 or more")
        self.rollouts = int(rollouts)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit":
            per_rollout = rollout_owner(trainer).reuse * trainer.accumulate_grad_batches
            trainer.val_check_interval = self.rollouts * per_rollout
            trainer.check_val_every_n_epoch = None
