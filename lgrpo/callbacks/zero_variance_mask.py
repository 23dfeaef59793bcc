"""Groups that teach nothing are taken out."""

from __future__ import annotations

import lightning as L

from lgrpo.functional import has_reward_variance
from lgrpo.hooks import RolloutCallback
from lgrpo.types import RolloutBatch


class ZeroVarianceMask(RolloutCallback):
    """Takes groups whose G rewards are all equal out of the loss, KL term included (Mroueh et al., equation 8).

    A centred advantage is 0 there, but without the mask a KL term, or any other regulariser, would go on pulling on
    them: leave the mask out where that is wanted (AsymRE, OPMD). Whether their tokens still
    count in the denominator is the loss's aggregation's choice: ``over: all`` or ``over: live``.
    """

    def __init__(self, tolerance: float = 1e-6) -> None:
        """
        Args:
            tolerance: Rewards that differ by no more than this are equal.
        """
        if tolerance < 0:
            raise ValueError(f"zero_variance_mask.tolerance is {tolerance}; it cannot be negative")
        self.tolerance = tolerance

    def on_rollout_end(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: RolloutBatch) -> None:
        varied = has_reward_variance(batch.rewards, batch.group_size, self.tolerance)
        batch.loss_mask.logical_and_(varied[:, None])
