"""Mask of completions that hit the length limit."""

from __future__ import annotations

import lightning as L

from lgrpo.hooks import RolloutCallback
from lgrpo.types import RolloutBatch


class OverlongMask(RolloutCallback):
    """Takes completions that hit the length limit out of the loss (DAPO's over-long filter).

    Their rewards still count in the advantages of their siblings, which are computed before.
    """

    def on_rollout_end(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: RolloutBatch) -> None:
        batch.loss_mask.logical_and_(~batch.truncated[:, None])
