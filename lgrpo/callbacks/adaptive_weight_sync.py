"""Sync of the policy's weights to the engine when the policy has diverged by a given amount."""

from __future__ import annotations

import time
from typing import Any, Literal, final

import lightning as L
import torch

from lgrpo.callbacks.log_ratios import log_ratios
from lgrpo.callbacks.weight_sync import EngineSync
from lgrpo.checks import check_count, check_range
from lgrpo.hooks import rollout_owner
from lgrpo.metrics import OffPolicyMetrics
from lgrpo.run.loggers import log_metrics
from lgrpo.run.resume import ResumeSettings

Criterion = Literal["tv", "effective_sample_size", "clip_fraction"]

BUDGETS: dict[Criterion, float] = {"tv": 0.25, "effective_sample_size": 0.2, "clip_fraction": 0.1}
"""Default budget of each criterion."""


@final
class AdaptiveWeightSync(EngineSync):
    """Loads the policy into the engine when its divergence reaches a budget, instead of every v rollouts.

    Before rollout k the policy is run once, without gradient, over the newest rollout that the engine's weights
    sampled. The divergence is measured on these completions over all ranks, so that all take the same decision. The
    length of a cycle is not known in advance, so rollouts are sampled one at a time: ``data.generate_ahead`` has no
    effect, and an engine that can sample in the background does so only with a ``data.lead``.
    """

    def __init__(
        self,
        criterion: Criterion = "tv",
        budget: float | None = None,
        hysteresis: float = 0.1,
        minimum: int = 1,
        maximum: int = 50,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
    ) -> None:
        """
        Args:
            criterion: Measured quantity. tv: √(E KL(α ‖ π)/2) of whole completions, so that E TV² ≤ budget² by
                Pinsker's inequality (Mroueh et al.); effective_sample_size: its relative loss, 1 - ESS/n;
                clip_fraction: share of tokens whose ratio has left the band in the direction of their advantage.
            budget: Value at which a sync is due. By default 0.25 for tv, 0.2 for effective_sample_size, 0.1 for
                clip_fraction.
            hysteresis: Share of the budget by which a single measurement must exceed it. A smaller excess counts only
                if the previous measurement reached the budget too.
            minimum: Lower limit of the rollouts between two syncs.
            maximum: Upper limit of the rollouts between two syncs, whatever is measured.
            clip_low: Distance of clip_fraction's band below 1.
            clip_high: Distance of clip_fraction's band above 1.
        """
        if criterion not in BUDGETS:
            raise ValueError(f"weight_sync.criterion is {criterion!r}; it must be one of {', '.join(BUDGETS)}")
        budget = float(BUDGETS[criterion] if budget is None else budget)
        if criterion == "tv":
            check_range("weight_sync.budget", budget, above=0)
        else:
            check_range("weight_sync.budget", budget, above=0, below=1, reason=f"{criterion} is a share")
        check_range("weight_sync.hysteresis", hysteresis, at_least=0)
        check_count("weight_sync.minimum", minimum, at_least=1)
        check_count("weight_sync.maximum", maximum, at_least=minimum, reason="it is not below the minimum")
        check_range("weight_sync.clip_low", clip_low, at_least=0, at_most=1)
        check_range("weight_sync.clip_high", clip_high, at_least=0)
        self.criterion: Criterion = criterion
        self.budget = budget
        self.hysteresis = float(hysteresis)
        self.minimum, self.maximum = minimum, maximum
        self.metric = OffPolicyMetrics(clip_low, clip_high)
        self._reset()

    def __str__(self) -> str:
        return f"AdaptiveWeightSync(criterion={self.criterion}, budget={self.budget})"

    def _reset(self) -> None:
        self._synced_at: int | None = None  # rollout of the last sync
        self._was_above = False
        self._reason: dict[str, Any] = {}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        self._reset()
        data = rollout_owner(trainer)
        if data.behaviour_logprobs == "policy" and self.maximum > 1:
            raise ValueError(
                "data.behaviour_logprobs is 'policy', which needs a cycle sampled before its first step, but with "
                "AdaptiveWeightSync its length is not known in advance. Use 'engine'"
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
        if since < self.minimum or trainer.global_step == rollout_owner(trainer).engine.state.step:
            return False
        if since >= self.maximum:
            return self._sync(rollout, "maximum")
        value = self._measure(trainer)
        if value is None:
            return False
        confirmed = self._was_above or value >= self.budget * (1 + self.hysteresis)
        self._was_above = value >= self.budget
        return self._was_above and confirmed and self._sync(rollout, "budget", divergence=value)

    def reason(self) -> dict[str, Any]:
        return self._reason

    def resume_settings(self) -> ResumeSettings:
        return {"weight_sync": {"class": type(self).__name__, "criterion": self.criterion, "budget": self.budget}}

    def state_dict(self) -> dict[str, Any]:
        return {"synced_at": self._synced_at, "was_above": self._was_above}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._synced_at, self._was_above = state["synced_at"], state["was_above"]

    def _sync(self, rollout: int, reason: str, **more: float) -> bool:
        self._reason = {"rollout": rollout, "reason": reason, **more}
        self._synced_at, self._was_above = rollout, False
        return True

    def _measure(self, trainer: L.Trainer) -> float | None:
        """Return the current value of the criterion; None without a completion of the engine's weights."""
        start, data = time.perf_counter(), rollout_owner(trainer)
        batches = data.sampled()
        if not batches:
            return None
        step = torch.tensor(data.engine.state.step)
        newest = next((b for b in reversed(batches) if bool(b.token_steps.eq(step).any())), batches[-1])
        is_current = newest.token_steps.eq(step)  # none if late groups fill a rank's whole rollout
        rows = is_current.any(1)
        metric = self.metric.to(trainer.strategy.root_device)
        metric.reset()
        metric.update(
            log_ratio=log_ratios(trainer, newest)[rows],
            mask=(newest.completion_mask & is_current)[rows],
            advantages=newest.advantages[rows],
        )
        values = metric.compute()
        if "tv_rms" not in values:
            return None
        value = {
            "tv": values["tv_rms"],
            "effective_sample_size": 1 - values["effective_sample_size"],
            "clip_fraction": values["clip_fraction"],
        }[self.criterion].item()
        seconds = time.perf_counter() - start
        log_metrics(trainer, {"sync/divergence": value, "time/divergence": seconds}, trainer.global_step)
        return value
