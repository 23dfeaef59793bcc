"""policy → engine, every v rollouts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, final

import lightning as L
from jsonargparse.typing import PositiveInt

from lgrpo.callbacks.lines import append_lines
from lgrpo.hooks import RolloutCallback, policy_owner, rollout_owner
from lgrpo.settings import Settings


class EngineSync(RolloutCallback, ABC):
    """Hands the engine the policy before the rollouts a subclass chooses, and keeps the ledger in ``syncs.jsonl``."""

    order = 0

    @abstractmethod
    def is_due(self, trainer: L.Trainer, rollout: int) -> bool:
        """Whether the engine gets the policy before rollout k. Asked once for each rollout; the same on all ranks."""

    def num_rollouts(self, trainer: L.Trainer, rollout: int) -> int | None:
        """How many rollouts will be sampled from weights that are handed over before rollout k, where it is known."""
        return None

    def reason(self) -> dict[str, Any]:
        """What the ledger's line says beside the sync itself: why it came."""
        return {}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        others = [c for c in trainer.callbacks if isinstance(c, EngineSync)]  # type: ignore[attr-defined]
        if len(others) > 1:
            raise ValueError(
                f"the Trainer has {len(others)} callbacks that sync the engine ({', '.join(map(str, others))}): it can "
                "follow only one"
            )

    def on_rollout_start(self, trainer: L.Trainer, pl_module: L.LightningModule, rollout: int) -> None:
        data = rollout_owner(trainer)
        engine = data.engine
        before = self.state_dict()
        if not self.is_due(trainer, rollout):
            is_sampled = any(batch.rollout == rollout for batch in data.sampled())
            if is_sampled or not (engine.spent or engine.step is None):
                return  # else there are no weights to sample from: a resumed run has another period
        weights = policy_owner(trainer).policy_weights()
        try:
            record = engine.load_weights(weights, trainer.global_step, self.num_rollouts(trainer, rollout))
        except BaseException:
            self.load_state_dict(before)  # in a checkpoint written now, this sync is still to come
            raise
        if trainer.is_global_zero:
            append_lines(trainer, "syncs.jsonl", [record.as_dict() | {"rollout": rollout} | self.reason()], "version")


@final
class WeightSync(EngineSync):
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

    def __str__(self) -> str:
        return f"WeightSync(period={self.period})"

    def is_due(self, trainer: L.Trainer, rollout: int) -> bool:
        since = rollout - rollout_owner(trainer).lead  # rollouts trained on by now
        return rollout == 0 or (self.period is not None and since >= 0 and since % self.period == 0)

    def num_rollouts(self, trainer: L.Trainer, rollout: int) -> int | None:
        lead = rollout_owner(trainer).lead
        if self.period is None:
            return None
        return lead if rollout < lead else self.period - (rollout - lead) % self.period

    def resume_settings(self) -> Settings:
        return {"weight_sync": {"class": type(self).__name__, "period": self.period}}
