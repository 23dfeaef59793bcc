"""Sync of the policy's weights to the engine, every v rollouts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import Any, final

import lightning as L

from lgrpo.callbacks.jsonl import append_lines
from lgrpo.checks import check_count, check_schedule
from lgrpo.functional.sync_cycle import Period, is_sync_due, num_rollouts_in_cycle
from lgrpo.hooks import RolloutCallback, RolloutOwner, policy_owner, rollout_owner
from lgrpo.run.resume import ResumeSettings, describe


class EngineSync(RolloutCallback, ABC):
    """Loads the policy into the engine before the rollouts that a subclass chooses, and logs it to ``syncs.jsonl``.

    For each rollout k, ``on_rollout_start`` calls ``is_due`` once and, if it syncs, ``num_rollouts`` and ``reason``.
    """

    order = 0

    @abstractmethod
    def is_due(self, trainer: L.Trainer, rollout: int) -> bool:
        """Return whether to sync before rollout k; the same on all ranks."""

    def num_rollouts(self, trainer: L.Trainer, rollout: int) -> int | None:
        """Return how many rollouts will be sampled with the weights of a sync before rollout k; None if unknown."""
        return None

    def reason(self) -> dict[str, Any]:
        """Return why the last sync was due, for its line in ``syncs.jsonl``."""
        return {}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        others = [c for c in trainer.callbacks if isinstance(c, EngineSync)]  # type: ignore[attr-defined]
        if len(others) > 1:
            raise ValueError(
                f"the Trainer has {len(others)} callbacks that sync the engine ({', '.join(map(str, others))}): keep "
                "one of them"
            )

    def on_rollout_start(self, trainer: L.Trainer, pl_module: L.LightningModule, rollout: int) -> None:
        data = rollout_owner(trainer)
        engine = data.engine
        before = self.state_dict()
        if not self.is_due(trainer, rollout):
            is_sampled = any(batch.rollout == rollout for batch in data.sampled())
            if is_sampled or not (engine.state.exhausted or engine.state.step is None):
                return  # otherwise the engine has no weights for it, because the run was resumed with another period
        weights = policy_owner(trainer).policy_weights()
        try:
            with data.schedule.paused():  # a run resumed with a shorter period may be sampling from the longer cycle
                record = engine.load_weights(weights, trainer.global_step, self.num_rollouts(trainer, rollout))
        except BaseException:
            self.load_state_dict(before)  # a checkpoint written now must repeat this sync
            raise
        if trainer.is_global_zero:
            append_lines(trainer, "syncs.jsonl", [record.as_dict() | {"rollout": rollout} | self.reason()], "version")


@final
class WeightSync(EngineSync):
    """Loads the policy into the engine before rollouts 0, v, 2v, …, so the lag is 0 to v - 1 rollouts.

    With a lead of o rollouts (``data.lead``) it syncs before rollouts 0, o, o + v, o + 2v, …, when 0, 0, v, 2v, …
    rollouts have been trained on. It has no state: the rollout's index decides.
    """

    def __init__(self, period: Period = 1, in_flight: bool = False) -> None:
        """
        Args:
            period: v, in rollouts. 1 is on-policy; null never syncs after the first time (offline). ``{0: 1, 20: 5}``
                changes it during the run: from rollout 20 on it syncs before rollouts 20, 25, 30, …
            in_flight: Whether a sync interrupts the generation that is running, which then continues from its tokens
                with the new weights. Otherwise the sync waits until it ends. Needs ``data.overlap`` and ``data.lead``.
        """
        reason = "it is a number of rollouts"
        check_schedule("weight_sync.period", period, partial(check_count, at_least=1, reason=reason))
        self._period = period
        self.in_flight = in_flight

    @property
    def period(self) -> Period:
        """v. It is fixed, because the engine is told at each sync how long its weights are needed."""
        return self._period

    @period.setter
    def period(self, value: Period) -> None:
        raise AttributeError(
            f"WeightSync.period is {self._period} and cannot be changed to {value} in a run: give a schedule, "
            "WeightSync({0: 1, 20: 5}), use AdaptiveWeightSync, or subclass lgrpo.callbacks.EngineSync"
        )

    def __str__(self) -> str:
        return f"WeightSync(period={self.period})"

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        data = rollout_owner(trainer)
        if stage != "fit":
            return
        if self.in_flight:
            check_in_flight(data)
            data.schedule.pause.is_allowed = True
        if data.behaviour_logprobs == "engine":
            return
        reason = "data.behaviour_logprobs is 'policy', which computes log π_α while the policy still equals π_α"
        periods = set(self.period.values()) if isinstance(self.period, dict) else {self.period}
        is_offline = None in periods
        if is_offline or (periods != {1} and not data.generate_ahead):
            raise ValueError(
                f"{reason}, but with weight_sync.period {'null' if self.period is None else self.period} most rollouts "
                "are sampled after the policy has changed. Use 'engine'"
                + ("" if is_offline else ", or set data.generate_ahead to sample a cycle before its first step")
            )
        if data.overlap and (data.lead or periods != {1}):
            raise ValueError(
                f"{reason}, but with data.overlap rollouts are sampled in the background while the policy changes. Use "
                "'engine', or set data.overlap to false"
            )

    def is_due(self, trainer: L.Trainer, rollout: int) -> bool:
        return is_sync_due(rollout, self.period, rollout_owner(trainer).lead)

    def num_rollouts(self, trainer: L.Trainer, rollout: int) -> int | None:
        return num_rollouts_in_cycle(rollout, self.period, rollout_owner(trainer).lead)

    def resume_settings(self) -> ResumeSettings:
        own = {"class": type(self).__name__, "period": describe(self.period), "in_flight": self.in_flight}
        return {"weight_sync": own}


def check_in_flight(data: RolloutOwner) -> None:
    """Raise an error if a sync can never find a generation to interrupt, or the engine cannot continue one."""
    if not data.engine.can_continue:
        raise ValueError(
            f"weight_sync.in_flight is true, but {type(data.engine).__name__} cannot continue completions from their "
            "tokens: use VLLMServerEngine, or an EnginePool of VLLMEngine"
        )
    if not data.overlap or data.lead == 0:
        raise ValueError(
            f"weight_sync.in_flight is true, but with data.overlap {str(data.overlap).lower()} and data.lead "
            f"{data.lead} nothing is being sampled when a sync is due: set data.overlap to true and data.lead to 1 or "
            "more"
        )
    if data.partial is not None:
        raise ValueError(
            "weight_sync.in_flight and data.partial are both set: a group could then have more versions than "
            "data.partial.max_spans. Set one of them"
        )
