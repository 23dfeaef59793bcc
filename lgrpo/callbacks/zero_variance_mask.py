"""Mask of groups without reward variance."""

from __future__ import annotations

import lightning as L

from lgrpo.checks import check_range
from lgrpo.functional import has_reward_variance
from lgrpo.hooks import RolloutCallback, policy_owner, rollout_owner
from lgrpo.types import RolloutBatch


class ZeroVarianceMask(RolloutCallback):
    """Takes groups whose G rewards are all equal out of the loss, KL term included (Mroueh et al., equation 8).

    Their centred advantage is 0, but without the mask a KL term or another regulariser would still act on them; leave
    the mask out for methods that need this (AsymRE, OPMD). The loss's aggregation decides whether their tokens count in
    the denominator: ``over: all`` or ``over: live``.
    """

    def __init__(self, tolerance: float = 1e-6) -> None:
        """
        Args:
            tolerance: Largest difference between rewards that count as equal.
        """
        check_range("zero_variance_mask.tolerance", tolerance, at_least=0)
        self.tolerance = tolerance

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if (advantage := rollout_owner(trainer).advantage).uses_zero_variance:
            raise ValueError(
                "zero_variance_mask takes groups whose rewards are all equal out of the loss, but their completions "
                f"may have an advantage with data.advantage {type(advantage).__name__}: set zero_variance_mask: null"
            )
        if policy_owner(trainer).loss.needs_zero_variance:
            raise ValueError(
                "zero_variance_mask takes groups whose rewards are all equal out of the loss, but model.loss has a "
                "part for these groups (EntropyGuided, MasteredHinge or TeacherKL): set zero_variance_mask: null"
            )

    def on_rollout_end(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: RolloutBatch) -> None:
        varied = has_reward_variance(batch.rewards, batch.group_size, self.tolerance)
        batch.loss_mask.logical_and_(varied[:, None])
