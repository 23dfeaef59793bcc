"""policy → engine, every v rollouts."""

from __future__ import annotations

import lightning as L
from jsonargparse.typing import PositiveInt

from lgrpo.callbacks.lines import append_lines
from lgrpo.hooks import RolloutCallback, policy_owner, rollout_owner, run_folder


class WeightSync(RolloutCallback):
    """Hands the engine the policy before rollouts 0, v, 2v, …: the behaviour policy is then 0 to v - 1 rollouts old.

    With a lead of o rollouts (``data.lead``), before rollouts 0, o, o + v, o + 2v, …: by then 0, 0, v, 2v, … rollouts
    are trained on. It keeps no state: the rollout's index is its clock.
    """

    def __init__(self, period: PositiveInt | None = 1) -> None:
        """
        Args:
            period: v, in rollouts. 1 is on-policy; null never syncs after the first time (offline).
        """
        if period is not None and period < 1:
            raise ValueError(f"weight_sync.period is {period}; it counts rollouts, 1 or more")
        self.period = None if period is None else int(period)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        others = [c for c in trainer.callbacks if isinstance(c, WeightSync)]  # type: ignore[attr-defined]
        if len(others) > 1:
            raise ValueError(
                f"the Trainer has {len(others)} WeightSync callbacks (periods {[c.period for c in others]}): the "
                "engine can follow only one"
            )

    def on_rollout_start(self, trainer: L.Trainer, pl_module: L.LightningModule, rollout: int) -> None:
        data = rollout_owner(trainer)
        since = rollout - data.lead  # rollouts trained on by now
        if rollout == 0 or (self.period is not None and since >= 0 and since % self.period == 0):
            weights = policy_owner(trainer).policy_weights()
            num_rollouts = data.lead if rollout < data.lead else self.period
            record = data.engine.load_weights(weights, trainer.global_step, num_rollouts)
            if trainer.is_global_zero:
                line = {**record.as_dict(), "rollout": rollout}
                path = run_folder(trainer) / "syncs.jsonl"
                append_lines(path, [line], "version", resumed=trainer.ckpt_path is not None)
