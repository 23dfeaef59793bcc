"""Terms of the improvement theorem, measured in a run."""

from __future__ import annotations

import time
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lgrpo.callbacks.log_ratios import log_ratios
from lgrpo.checks import check_count, check_range
from lgrpo.functional import completion_log_ratio, trust_region_terms
from lgrpo.functional.sync_cycle import is_selected
from lgrpo.hooks import RolloutCallback, rollout_owner
from lgrpo.metrics import CalibrationMetrics, ImprovementMetrics, LagHistogram, OffPolicyMetrics
from lgrpo.run.checkpoints import gather_ranks
from lgrpo.run.loggers import log_metrics
from lgrpo.types import RolloutBatch


class ImprovementMonitor(RolloutCallback):
    """Logs every term of Mroueh et al.'s Theorem 1 for one in n rollouts, with ratios of whole completions, and TRM's.

    π is the policy after the rollout's last optimizer step, π_k the policy before its first, α the policy that sampled.
    The first two need a pass without gradient each. Weights and completions of the run do not change. π was trained on
    the completions that measure it, so the gain is optimistic. With held-out prompts an unbiased one is logged at every
    sync: the gain predicted from samples of the old weights, and the one seen in samples of the new weights.
    """

    def __init__(
        self,
        every: int = 10,
        num_held_out: int = 0,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        eps: float = 1e-4,
    ) -> None:
        """
        Args:
            every: Average number of rollouts from one that is measured to the next. Rollout 0 is measured, later ones
                at varying offsets, so that all lags occur.
            num_held_out: Number of prompts of the task's validation set that are sampled at every sync, group_size
                completions each, to compare the prediction with. 0 for none.
            clip_low: Distance of the ratio below 1 from which a token with a negative advantage counts as clipped.
            clip_high: Distance of the ratio above 1 from which a token with a positive advantage counts as clipped.
            eps: Constant in s = √(σ² + eps).
        """
        check_count("improvement_monitor.every", every, at_least=1)
        check_count("improvement_monitor.num_held_out", num_held_out, at_least=0)
        check_range("improvement_monitor.clip_low", clip_low, at_least=0, at_most=1)
        check_range("improvement_monitor.clip_high", clip_high, at_least=0)
        check_range("improvement_monitor.eps", eps, above=0, reason="otherwise s could be 0")
        self.every = every
        self.num_held_out = num_held_out
        self.terms = ImprovementMetrics(eps)
        self.divergence = OffPolicyMetrics(clip_low, clip_high)
        self.calibration = CalibrationMetrics()
        self.lags = LagHistogram()
        self._reset()

    def _reset(self) -> None:
        self._started = -1  # the last rollout whose first step has started
        self._proximal: Tensor | None = None  # [B] log π_k/α of its completions, if it is measured
        self._held_out: RolloutBatch | None = None  # completions of held-out prompts by the engine's weights
        self._version: int | None = None  # version of these weights
        self._seconds = 0.0
        self.lags.reset()

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit":
            self._reset()
            for metric in (self.terms, self.divergence, self.calibration, self.lags):
                metric.to(trainer.strategy.root_device)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._finish(trainer)  # the run may have been interrupted after a rollout's last step

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        rollout, reuse = rollout_owner(trainer).rollout, rollout_owner(trainer).reuse
        if rollout is None or rollout.rollout == self._started or trainer.global_step != rollout.rollout * reuse:
            return
        if self.num_held_out:
            self._calibrate(trainer)
        start = time.perf_counter()
        is_due = is_selected(rollout.rollout, self.every)
        self._proximal = self._completion_log_ratios(trainer, rollout) if is_due else None
        lag = rollout.lag(trainer.global_step)[rollout.loss_mask.any(1)]
        lags = (lag[~lag.isnan()].long()[:, None] + torch.arange(reuse)).flatten()  # recorded completions have none
        max_lag = rollout_owner(trainer).max_lag
        self.lags.update(lags if max_lag is None else lags[lags <= max_lag])
        self._started, self._seconds = rollout.rollout, time.perf_counter() - start

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self._finish(trainer)

    def _finish(self, trainer: L.Trainer) -> None:
        """Log the terms of a measured rollout under the current policy, if its last step is done."""
        rollout, reuse = rollout_owner(trainer).rollout, rollout_owner(trainer).reuse
        if self._proximal is None or rollout is None or rollout.rollout != self._started:
            return
        if trainer.global_step != (rollout.rollout + 1) * reuse:
            return
        start = time.perf_counter()
        size = rollout.group_size
        log_ratio = log_ratios(trainer, rollout)
        has_ratio = ~log_ratio.isnan().any(1).view(-1, size).any(1).repeat_interleave(size)
        known = rollout.is_known & has_ratio  # recorded groups may lack log-probabilities
        log_ratio, mask = log_ratio[known], rollout.completion_mask[known]
        rewards = rollout.rewards[known].view(-1, size)
        self.terms.update(
            log_ratio=completion_log_ratio(log_ratio, mask).view(-1, size),
            proximal_log_ratio=self._proximal[known].view(-1, size),
            rewards=rewards,
            trust_region=trust_region_terms(log_ratio, rollout.behaviour_logprobs[known], mask, rewards.double()),
        )
        self.divergence.update(log_ratio=log_ratio, mask=mask, advantages=rollout.advantages[known])
        metrics = self._compute(self.terms) | self._compute(self.divergence) | self._compute(self.lags)
        if "gain" in metrics and metrics["zero_variance_fraction"] < 1 and "bound_2" not in metrics:
            rank_zero_warn(
                "rewards outside [0, 1]: the improvement theorem does not apply to them, so no bound is logged"
            )
        named = {f"monitor/{name}": value for name, value in metrics.items()}
        self._proximal, seconds = None, self._seconds + time.perf_counter() - start
        log_metrics(trainer, named | {"time/monitor": seconds}, trainer.global_step - 1)

    def _calibrate(self, trainer: L.Trainer) -> None:
        """After a sync, log the gain that was predicted for the new weights and the one they show."""
        data = rollout_owner(trainer)
        if data.engine.state.version == self._version or data.engine.state.step != trainer.global_step:
            return
        start, old, new = time.perf_counter(), self._held_out, data.sample_held_out(self.num_held_out)
        if old is not None:
            known, size = old.is_known & new.is_known, old.group_size
            self.calibration.update(
                log_ratio=self._completion_log_ratios(trainer, old)[known].view(-1, size),
                before=old.rewards[known].view(-1, size),
                after=new.rewards[known].view(-1, size),
            )
            metrics = {f"calibration/{name}": value for name, value in self._compute(self.calibration).items()}
            seconds = time.perf_counter() - start
            log_metrics(trainer, metrics | {"time/calibration": seconds}, trainer.global_step)
        self._held_out, self._version = new, data.engine.state.version

    @staticmethod
    def _compute(metric: Any) -> dict[str, float]:
        """Return the values over all ranks, and reset the metric."""
        values = {name: value.item() for name, value in metric.compute().items()}
        metric.reset()
        return values

    @staticmethod
    def _completion_log_ratios(trainer: L.Trainer, batch: RolloutBatch) -> Tensor:
        return completion_log_ratio(log_ratios(trainer, batch), batch.completion_mask)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        state = {
            "started": self._started,
            "proximal": self._proximal,
            "held_out": self._held_out and self._held_out.state_dict(),
            "version": self._version,
            "lags": self.lags.counts.cpu(),
        }
        checkpoint["improvement_monitor"] = gather_ranks(trainer, state)

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        ranks = checkpoint.get("improvement_monitor", [])
        if len(ranks) != trainer.world_size:  # written without a monitor: start with the next rollout
            return
        state = ranks[trainer.global_rank]
        self._started, self._proximal, self._version = state["started"], state["proximal"], state["version"]
        self._held_out = state["held_out"] and RolloutBatch.from_state_dict(state["held_out"])
        self.lags.update(torch.zeros(0, dtype=torch.int64))  # torchmetrics warns about a metric without an update
        self.lags.counts = state["lags"].to(self.lags.device)
