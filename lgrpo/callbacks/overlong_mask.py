"""Answers that were cut off are taken out."""

from __future__ import annotations

import lightning as L

from lgrpo.hooks import RolloutCallback
from lgrpo.types import RolloutBatch


class OverlongMask(RolloutCallback):
    """Takes completions that hit the length limit out of the loss (DAPO's over-long filter).

    What they would have come to is not known, so neither their reward nor their tokens teach. They still count among
    their siblings: the advantages are known by then.
    """

    def on_rollout_end(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: RolloutBatch) -> None:
        batch.loss_mask.logical_and_(~batch.truncated[:, None])
