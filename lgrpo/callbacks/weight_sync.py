"""policy → engine, every v rollouts."""

from __future__ import annotations

import lightning as L
from jsonargparse.typing import PositiveInt

from lgrpo.hooks import RolloutCallback, policy_owner, rollout_owner


class WeightSync(RolloutCallback):
    """Hands the engine the policy before rollouts 0, v, 2v, …: the behaviour policy is then 0 to v - 1 rollouts old.

    It keeps no state: the rollout's index is its clock.
    """

    def __init__(self, period: PositiveInt | None = 1) -> None:
        """
        Args:
            period: v, in rollouts. 1 is on-policy; null never syncs after the first time (offline).
        """
        if period is not None and period < 1:
            raise ValueError(f"weight_sync.period is {period}; it counts rollouts, 1 or more")
        self.period = period

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        others = [c for c in trainer.callbacks if isinstance(c, WeightSync)]  # type: ignore[attr-defined]
        if len(others) > 1:
            raise ValueError(
                f"the Trainer has {len(others)} WeightSync callbacks (periods {[c.period for c in others]}): the "
                "engine can follow only one"
            )

    def on_rollout_start(self, trainer: L.Trainer, pl_module: L.LightningModule, rollout: int) -> None:
        if rollout == 0 or (self.period is not None and rollout % self.period == 0):
            weights = policy_owner(trainer).policy_weights()
            rollout_owner(trainer).engine.load_weights(weights, trainer.global_step, num_rollouts=self.period or 1)
