"""policy → engine, every v rollouts."""

from __future__ import annotations

import contextlib

import lightning as L
from jsonargparse.typing import PositiveInt

from lgrpo.hooks import RolloutCallback, append_lines, policy_owner, rollout_owner, run_folder
from lgrpo.settings import Settings

LEDGER = "syncs.jsonl"


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
        self._is_written = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        others = [c for c in trainer.callbacks if isinstance(c, WeightSync)]  # type: ignore[attr-defined]
        if len(others) > 1:
            raise ValueError(
                f"the Trainer has {len(others)} WeightSync callbacks (periods {[c.period for c in others]}): the "
                "engine can follow only one"
            )
        self._is_written = False

    def on_rollout_start(self, trainer: L.Trainer, pl_module: L.LightningModule, rollout: int) -> None:
        data = rollout_owner(trainer)
        since = rollout - data.lead  # rollouts trained on by now
        is_due = self.period is not None and since >= 0 and since % self.period == 0
        if rollout == 0 or is_due or data.engine.spent:  # spent: after a resume with another period
            weights = policy_owner(trainer).policy_weights()
            num_rollouts = data.lead if rollout < data.lead else self.period and self.period - since % self.period
            data.engine.load_weights(weights, trainer.global_step, num_rollouts)
            self._write(trainer)

    def resume_settings(self) -> Settings:
        return {"weight_sync": {"class": type(self).__name__, "period": self.period}}

    def _write(self, trainer: L.Trainer) -> None:
        """Adds the sync to the run's ledger; after a resume first drops those that are to come again."""
        if not trainer.is_global_zero:
            return
        ledger = rollout_owner(trainer).engine.ledger
        path = run_folder(trainer) / LEDGER
        if not self._is_written:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        append_lines(trainer, LEDGER, [record.as_dict() for record in (ledger[-1:] if self._is_written else ledger)])
        self._is_written = True
