"""policy → reference."""

from __future__ import annotations

import lightning as L
from jsonargparse.typing import PositiveInt

from lgrpo.hooks import RolloutCallback, policy_owner, rollout_owner


class ReferenceRefresh(RolloutCallback):
    """Moves the reference to the policy at the start of each stage, or every so many rollouts."""

    def __init__(self, period: PositiveInt | None = None, decay: float = 0.0) -> None:
        """
        Args:
            period: In rollouts; by default once per stage, that is per Lightning epoch.
            decay: How much of the old reference stays: 0 copies the policy, 0.99 is a slow moving average.
        """
        if period is not None and period < 1:
            raise ValueError(f"reference_refresh.period is {period}; it counts rollouts, 1 or more")
        if not 0 <= decay < 1:
            raise ValueError(f"reference_refresh.decay is {decay}; it is a share from 0 up to, not including, 1")
        self.period = None if period is None else int(period)
        self.decay = decay

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit" and not policy_owner(trainer).needs_reference:
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
        """Rollouts in an epoch as Lightning runs it, ``limit_train_batches`` included."""
        batches = trainer.accumulate_grad_batches * rollout_owner(trainer).reuse
        return max(1, int(trainer.num_training_batches) // batches)
