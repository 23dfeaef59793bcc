"""policy → engine, when the policy has moved far enough."""

from __future__ import annotations

import time
from typing import Any, Literal, final

import lightning as L
import torch
from jsonargparse.typing import PositiveFloat, PositiveInt

from lgrpo.callbacks.weight_sync import EngineSync
from lgrpo.hooks import log_figures, log_ratios, rollout_owner
from lgrpo.metrics import OffPolicyMetrics
from lgrpo.settings import Settings

Criterion = Literal["tv", "effective_sample_size", "clip_fraction"]

BUDGETS: dict[Criterion, float] = {"tv": 0.25, "effective_sample_size": 0.2, "clip_fraction": 0.1}
"""Where the user names none."""


@final
class AdaptiveWeightSync(EngineSync):
    """Hands the engine the policy when a budget of divergence is spent, instead of every v rollouts.

    Before rollout k the policy is run once, without gradient, over the newest rollout that the engine's weights
    sampled. How far it has moved from them is measured on these completions, all ranks together, so that the decision
    follows from the run alone. Since nobody knows beforehand when the next sync comes, the engine is asked for one
    rollout at a time: ``data.generate_ahead`` has no effect, and an engine that can sample in the background does so
    only with a ``data.lead``.
    """

    def __init__(
        self,
        criterion: Criterion = "tv",
        budget: PositiveFloat | None = None,
        hysteresis: float = 0.1,
        minimum: PositiveInt = 1,
        maximum: PositiveInt = 50,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
    ) -> None:
        """
        Args:
            criterion: What is measured. tv: √(E KL(α ‖ π)/2) of whole completions, so that E TV² ≤ budget² by Pinsker's
                inequality (Mroueh et al.); effective_sample_size: the share of it that is lost, 1 - ESS/n;
                clip_fraction: the share of tokens whose ratio has left the band on the side they are pushed to.
            budget: A sync comes when the measured value reaches it. By default 0.25 for tv, 0.2 for
                effective_sample_size, 0.1 for clip_fraction.
            hysteresis: A value above the budget by less than this share of it counts only if the one before was above
                it too: a single odd measurement near the line does not bring a sync.
            minimum: Rollouts the weights stay still at least.
            maximum: Rollouts they stay still at most, whatever is measured.
            clip_low: The band of clip_fraction reaches this far below 1.
            clip_high: And this far above 1.
        """
        if criterion not in BUDGETS:
            raise ValueError(f"weight_sync.criterion is {criterion!r}; it is one of {', '.join(BUDGETS)}")
        if budget is not None and not budget > 0:
            raise ValueError(f"weight_sync.budget is {budget}; it must be above 0")
        if criterion != "tv" and budget is not None and budget >= 1:
            raise ValueError(f"weight_sync.budget is {budget}, but {criterion} is a share: it must be below 1")
        if hysteresis < 0:
            raise ValueError(f"weight_sync.hysteresis is {hysteresis}; it is a share of the budget, 0 or more")
        if not 1 <= minimum <= maximum:
            raise ValueError(
                f"weight_sync.minimum is {minimum} and weight_sync.maximum {maximum}: they count rollouts, 1 or more, "
                "and the maximum is not below the minimum"
            )
        if not (0 <= clip_low <= 1 and clip_high >= 0):
            raise ValueError(f"weight_sync.clip_low is {clip_low} and clip_high {clip_high}: no band around 1")
        self.criterion: Criterion = criterion
        self.budget = float(BUDGETS[criterion] if budget is None else budget)
        self.hysteresis = float(hysteresis)
        self.minimum, self.maximum = int(minimum), int(maximum)
        self.metric = OffPolicyMetrics(clip_low, clip_high)
        self._forget()

    def __str__(self) -> str:
        return f"AdaptiveWeightSync(criterion={self.criterion}, budget={self.budget})"

    def _forget(self) -> None:
        self._synced_at: int | None = None  # the rollout before which the engine was given its weights
        self._was_above = False
        self._reason: dict[str, Any] = {}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        self._forget()
        data = rollout_owner(trainer)
        if data.behaviour_logprobs == "policy" and self.maximum > 1:
            raise ValueError(
                "data.behaviour_logprobs is 'policy', which needs a cycle sampled before its first step, but with "
                "AdaptiveWeightSync nobody knows its length beforehand. Use 'engine'"
            )
        if data.lead and self.criterion == "clip_fraction":
            raise ValueError(
                "weight_sync.criterion clip_fraction reads advantages, which rollouts sampled ahead (data.lead) do not "
                "have yet. Use tv or effective_sample_size"
            )

    def is_due(self, trainer: L.Trainer, rollout: int) -> bool:
        if self._synced_at is None:
            return self._sync(rollout, "first")
        since = rollout - self._synced_at
        if since < self.minimum or trainer.global_step == rollout_owner(trainer).engine.step:
            return False
        if since >= self.maximum:
            return self._sync(rollout, "maximum")
        value = self._measured(trainer)
        if value is None:
            return False
        confirmed = self._was_above or value >= self.budget * (1 + self.hysteresis)
        self._was_above = value >= self.budget
        return self._was_above and confirmed and self._sync(rollout, "budget", divergence=value)

    def reason(self) -> dict[str, Any]:
        return self._reason

    def resume_settings(self) -> Settings:
        return {"weight_sync": {"class": type(self).__name__, "criterion": self.criterion, "budget": self.budget}}

    def state_dict(self) -> dict[str, Any]:
        return {"synced_at": self._synced_at, "was_above": self._was_above}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._synced_at, self._was_above = state["synced_at"], state["was_above"]

    def _sync(self, rollout: int, reason: str, **more: float) -> bool:
        self._reason = {"rollout": rollout, "reason": reason, **more}
        self._synced_at, self._was_above = rollout, False
        return True

    def _measured(self, trainer: L.Trainer) -> float | None:
        """How much of the budget's quantity there is by now; None where no completion of these weights is at hand."""
        start, data = time.perf_counter(), rollout_owner(trainer)
        batches = data.sampled()
        if not batches:
            return None
        step = torch.tensor(data.engine.step)
        newest = next((b for b in reversed(batches) if bool(b.behaviour_step.eq(step).any())), batches[-1])
        rows = newest.behaviour_step.eq(step)  # none, where late groups took all places of a rank
        metric = self.metric.to(trainer.strategy.root_device)
        metric.reset()
        metric.update(
            log_ratio=log_ratios(trainer, newest)[rows],
            mask=newest.completion_mask[rows],
            advantages=newest.advantages[rows],
        )
        figures = metric.compute()
        if "tv_rms" not in figures:
            return None
        value = {
            "tv": figures["tv_rms"],
            "effective_sample_size": 1 - figures["effective_sample_size"],
            "clip_fraction": figures["clip_fraction"],
        }[self.criterion].item()
        seconds = time.perf_counter() - start
        log_figures(trainer, {"sync/divergence": value, "time/divergence": seconds}, trainer.global_step)
        return value
