"""Whether the terms of the improvement theorem behave in a real run."""

from __future__ import annotations

import time
from typing import Any

import lightning as L
import torch
from jsonargparse.typing import NonNegativeInt, PositiveInt
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lgrpo.functional import completion_log_ratio
from lgrpo.hooks import RolloutCallback, log_figures, log_ratios, rollout_owner
from lgrpo.metrics import CalibrationMetrics, ImprovementMetrics, LagHistogram, OffPolicyMetrics
from lgrpo.types import RolloutBatch


class ImprovementMonitor(RolloutCallback):
    """Logs every term of Mroueh et al.'s Theorem 1 for every n-th rollout, with ratios of whole completions.

    π is the policy after the rollout's last optimizer step, π_k the one before its first, α the one that sampled: a
    pass without gradient for each of the first two. The run is not touched: the same weights and completions come out.
    π was trained on the very completions that are asked here, so the gain is an optimist's. With held-out prompts an
    honest one is logged at every sync: what the old weights' samples predict, and what the new weights' samples show.
    """

    def __init__(
        self,
        every: PositiveInt = 10,
        num_held_out: NonNegativeInt = 0,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        eps: float = 1e-4,
    ) -> None:
        """
        Args:
            every: Which rollouts: 0, every, 2 · every, …
            num_held_out: Prompts of the task's validation set that are sampled at every sync, group_size completions
                each, to hold the prediction against; 0: none.
            clip_low: A token counts as clipped when its ratio is this far below 1 and its advantage negative.
            clip_high: And when it is this far above 1 and its advantage positive.
            eps: Of s = √(σ² + eps).
        """
        if every < 1:
            raise ValueError(f"improvement_monitor.every is {every}; it counts rollouts, 1 or more")
        if num_held_out < 0:
            raise ValueError(f"improvement_monitor.num_held_out is {num_held_out}; it counts prompts, 0 or more")
        if not (0 <= clip_low <= 1 and clip_high >= 0):
            raise ValueError(f"improvement_monitor.clip_low is {clip_low} and clip_high {clip_high}: no band around 1")
        if not eps > 0:
            raise ValueError(f"improvement_monitor.eps is {eps}; it must be above 0, or s could be 0")
        self.every = int(every)
        self.num_held_out = int(num_held_out)
        self.terms = ImprovementMetrics(eps)
        self.divergence = OffPolicyMetrics(clip_low, clip_high)
        self.calibration = CalibrationMetrics()
        self.lags = LagHistogram()
        self._forget()

    def _forget(self) -> None:
        self._begun = -1  # the last rollout whose first pass has begun
        self._proximal: Tensor | None = None  # [B] log π_k/α of its completions, where it is measured
        self._held_out: RolloutBatch | None = None  # what the engine's weights make of held-out prompts
        self._version: int | None = None  # which sync brought these weights
        self._seconds = 0.0
        self.lags.reset()

    # When

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit":
            self._forget()
            for metric in (self.terms, self.divergence, self.calibration, self.lags):
                metric.to(trainer.strategy.root_device)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._finish(trainer)  # where an interrupt came behind a rollout's last step

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        rollout, reuse = rollout_owner(trainer).rollout, rollout_owner(trainer).reuse
        if rollout is None or rollout.rollout == self._begun or trainer.global_step != rollout.rollout * reuse:
            return
        start = time.perf_counter()
        if self.num_held_out:
            self._calibrate(trainer)
            start = time.perf_counter()
        is_due = rollout.rollout % self.every == 0
        self._proximal = self._completion_log_ratios(trainer, rollout) if is_due else None
        trained = rollout.loss_mask.any(1)
        lag = trainer.global_step - rollout.behaviour_step[trained]
        self.lags.update((lag[:, None] + torch.arange(reuse)).flatten())
        self._begun, self._seconds = rollout.rollout, time.perf_counter() - start

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self._finish(trainer)

    # What

    def _finish(self, trainer: L.Trainer) -> None:
        """After a measured rollout's last step: its terms, under the policy as it is now."""
        rollout, reuse = rollout_owner(trainer).rollout, rollout_owner(trainer).reuse
        if self._proximal is None or rollout is None or rollout.rollout != self._begun:
            return
        if trainer.global_step != (rollout.rollout + 1) * reuse:
            return
        start = time.perf_counter()
        known, size = rollout.is_known, rollout.group_size
        log_ratio = log_ratios(trainer, rollout)
        self.terms.update(
            log_ratio=completion_log_ratio(log_ratio, rollout.completion_mask)[known].view(-1, size),
            proximal_log_ratio=self._proximal[known].view(-1, size),
            rewards=rollout.rewards[known].view(-1, size),
        )
        self.divergence.update(
            log_ratio=log_ratio[known], mask=rollout.completion_mask[known], advantages=rollout.advantages[known]
        )
        figures = self._compute(self.terms) | self._compute(self.divergence) | self._compute(self.lags)
        if "gain" in figures and figures["zero_variance_fraction"] < 1 and "bound_2" not in figures:
            rank_zero_warn(
                "rewards outside [0, 1]: the improvement theorem says nothing of them, so no bound is logged"
            )
        named = {f"monitor/{name}": value for name, value in figures.items()}
        self._proximal, seconds = None, self._seconds + time.perf_counter() - start
        log_figures(trainer, named | {"time/monitor": seconds}, trainer.global_step - 1)

    def _calibrate(self, trainer: L.Trainer) -> None:
        """Where the engine was just given the policy: what that was expected to bring, and what it brings."""
        data = rollout_owner(trainer)
        if data.engine.version == self._version or data.engine.step != trainer.global_step:
            return
        start, old, new = time.perf_counter(), self._held_out, data.sample_held_out(self.num_held_out)
        if old is not None:
            known, size = old.is_known & new.is_known, old.group_size
            self.calibration.update(
                log_ratio=self._completion_log_ratios(trainer, old)[known].view(-1, size),
                before=old.rewards[known].view(-1, size),
                after=new.rewards[known].view(-1, size),
            )
            figures = {f"calibration/{name}": value for name, value in self._compute(self.calibration).items()}
            seconds = time.perf_counter() - start
            log_figures(trainer, figures | {"time/calibration": seconds}, trainer.global_step)
        self._held_out, self._version = new, data.engine.version

    @staticmethod
    def _compute(metric: Any) -> dict[str, float]:
        """The figures over all ranks; then the metric starts anew."""
        figures = {name: value.item() for name, value in metric.compute().items()}
        metric.reset()
        return figures

    @staticmethod
    def _completion_log_ratios(trainer: L.Trainer, batch: RolloutBatch) -> Tensor:
        return completion_log_ratio(log_ratios(trainer, batch), batch.completion_mask)

    # Stop and go on

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        own = {
            "begun": self._begun,
            "proximal": self._proximal,
            "held_out": self._held_out and self._held_out.state_dict(),
            "version": self._version,
            "lags": self.lags.counts.cpu(),
        }
        ranks: list[Any] = [own] * trainer.world_size
        if trainer.world_size > 1:
            torch.distributed.all_gather_object(ranks, own)
        checkpoint["improvement_monitor"] = ranks

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        ranks = checkpoint.get("improvement_monitor", [])
        if len(ranks) != trainer.world_size:  # written without a monitor: it begins with the next rollout
            return
        own = ranks[trainer.global_rank]
        self._begun, self._proximal, self._version = own["begun"], own["proximal"], own["version"]
        self._held_out = own["held_out"] and RolloutBatch.from_state_dict(own["held_out"])
        self.lags.update(torch.zeros(0, dtype=torch.int64))  # else torchmetrics would call it unused
        self.lags.counts = own["lags"].to(self.lags.device)
