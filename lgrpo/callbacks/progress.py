"""One line that says what the run is doing."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from tqdm import tqdm

from lgrpo.hooks import RolloutCallback, Stage
from lgrpo.types import RolloutBatch


class RolloutProgress(RolloutCallback, ProgressBar):
    """A live line in a terminal: the stage, the step, reward, lag and pass@1. Elsewhere a plain line now and then."""

    def __init__(self, lines: int = 10) -> None:
        """
        Args:
            lines: Where the output is not a terminal: about how many lines a run prints; 0 for none.
        """
        super().__init__()
        self.lines = lines
        self._bar: tqdm | None = None
        self._enabled = True
        self._started = 0.0

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._started = time.perf_counter()
        if self._enabled and trainer.is_global_zero and sys.stderr.isatty():
            sized = os.get_terminal_size(sys.stderr.fileno()).columns > 0  # some terminals do not know their size
            self._bar = tqdm(
                total=self._num_steps(trainer),
                initial=trainer.global_step,
                unit="step",
                dynamic_ncols=sized,
                ncols=None if sized else 100,
                nrows=None if sized else 24,
            )

    def on_stage(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: Stage) -> None:
        if self._bar is not None:
            self._bar.set_description_str(f"{stage:<8}")

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        figures = self._figures(trainer, batch)
        if self._bar is not None:
            self._bar.set_postfix_str(figures, refresh=False)
            self._bar.update(trainer.global_step - self._bar.n)
        elif self._enabled and self.lines and trainer.is_global_zero:
            total = self._num_steps(trainer)
            every = max(1, total // self.lines)
            if trainer.global_step % every == 0 or trainer.global_step == total:
                seconds = time.perf_counter() - self._started
                print(f"step {trainer.global_step}/{total}  {seconds:.0f} s  {figures}", flush=True)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._close()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _num_steps(self, trainer: L.Trainer) -> int:
        per_epoch = int(trainer.num_training_batches) // trainer.accumulate_grad_batches
        limits = [trainer.max_steps] if trainer.max_steps >= 0 else []
        if trainer.max_epochs is not None and trainer.max_epochs >= 0:
            limits.append(per_epoch * trainer.max_epochs)
        return min(limits, default=per_epoch)

    @staticmethod
    def _figures(trainer: L.Trainer, batch: RolloutBatch) -> str:
        lags = batch.lag(trainer.global_step - 1)  # the step just made is counted already
        known = lags[~lags.isnan()]
        lag = f"lag {int(known.max())}" if len(known) else "recorded"
        parts = [f"reward {batch.metrics['rollout/reward']:.3f}", lag]
        if "val/pass@1" in trainer.callback_metrics:
            parts.append(f"pass@1 {float(trainer.callback_metrics['val/pass@1']):.3f}")
        return "  ".join(parts)
