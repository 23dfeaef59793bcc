"""Refresh of the reference from the policy."""

from __future__ import annotations

import lightning as L

from lgrpo.checks import check_range
from lgrpo.hooks import RolloutCallback, policy_owner, rollout_owner


class ReferenceRefresh(RolloutCallback):
    """Refreshes the reference at the start of each stage, or every ``period`` rollouts."""

    def __init__(self, period: int | None = None, decay: float = 0.0) -> None:
        """
        Args:
            period: Number of rollouts between two refreshes. By default one stage, that is one Lightning epoch.
            decay: Weight of the old reference: 0 copies the policy, 0.99 is a slow moving average.
        """
        check_range("reference_refresh.period", period, at_least=1, reason="it is a number of rollouts")
        check_range("reference_refresh.decay", decay, at_least=0, below=1)
        self.period = period
        self.decay = decay

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit" and not policy_owner(trainer).loss.needs_reference:
            raise ValueError(
                "ReferenceRefresh has no reference to refresh: kl_coef is 0, so none is kept (or the loss has no "
                "ReferenceKL). Give the loss a KL term, or leave the callback out (reference_refresh: null)"
            )

    def on_rollout_start(self, trainer: L.Trainer, pl_module: L.LightningModule, rollout: int) -> None:
        period = self.period or self._stage_length(trainer)
        if rollout > 0 and rollout % period == 0:
            policy_owner(trainer).refresh_reference(self.decay)

    @staticmethod
    def _stage_length(trainer: L.Trainer) -> int:
        """Return the number of rollouts in an epoch, after ``limit_train_batches``."""
        batches = trainer.accumulate_grad_batches * rollout_owner(trainer).reuse
        return max(1, int(trainer.num_training_batches) // batches)
