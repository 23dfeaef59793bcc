"""Ctrl-C, and errors, that lose nothing."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info

from lgrpo.hooks import RolloutCallback, Stage


class GracefulInterrupt(RolloutCallback):
    """On Ctrl-C, or an error outside of an optimizer step: writes ``last.ckpt``, and says how to go on.

    Between an optimizer's step and Lightning's counting of it a checkpoint would hold new weights under an old number,
    and between the hooks of a rollout some would have run and some not. So there an interrupt waits; a second Ctrl-C
    does not, and writes nothing. Several ranks stop together, at the end of a step.
    """

    def __init__(self) -> None:
        self._busy = False
        self._asked = False
        self._defer = False
        self._previous: Any = None

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._busy = self._asked = False
        self._defer = trainer.world_size > 1
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._handle)

    def on_stage(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: Stage) -> None:
        self._busy = False
        self._stop_if_asked(trainer)
        self._busy = stage == "sync"

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._busy = False
            self._stop_if_asked(trainer, together=True)
        self._busy = True

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._busy = (batch_idx + 1) % trainer.accumulate_grad_batches != 0

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._stop_if_asked(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._stop_if_asked(trainer)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        started = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking and trainer.global_step > 0
        alone_with_an_error = trainer.world_size == 1 or isinstance(exception, KeyboardInterrupt)
        if self._busy or not started or not alone_with_an_error:
            return
        path = self._folder(trainer) / "last.ckpt"
        try:
            trainer.save_checkpoint(path)
        except Exception as error:  # the first error is the one to see
            rank_zero_info(
                f"Stopped after optimizer step {trainer.global_step}; no checkpoint could be written: {error}"
            )
            return
        rank_zero_info(
            f"Stopped after optimizer step {trainer.global_step}; nothing is lost, the checkpoint is {path}. To go on, "
            f"give the same command with --run {trainer.default_root_dir} --ckpt_path last (in Python: trainer.fit(…, "
            f"ckpt_path='{path}'))."
        )

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self._previous = None

    def _stop_if_asked(self, trainer: L.Trainer, together: bool = False) -> None:
        if self._defer:  # the ranks decide together, once a step
            asked = together and trainer.strategy.reduce_boolean_decision(self._asked, all=False)
        else:
            asked = self._asked
        if asked:
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if (self._busy or self._defer) and not self._asked:
            self._asked = True
            rank_zero_info("Interrupted: finishing this optimizer step first. Press Ctrl-C again to stop at once.")
            return
        raise KeyboardInterrupt

    @staticmethod
    def _folder(trainer: L.Trainer) -> Path:
        """Where ``ckpt_path='last'`` will look."""
        checkpoint = trainer.checkpoint_callback
        if isinstance(checkpoint, ModelCheckpoint) and checkpoint.dirpath:
            return Path(checkpoint.dirpath)
        return Path(trainer.default_root_dir) / "checkpoints"
