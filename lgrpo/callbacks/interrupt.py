"""Ctrl-C that loses nothing."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_info


class GracefulInterrupt(L.Callback):
    """On Ctrl-C: finishes the optimizer step it is in, writes ``last.ckpt``, and says how to go on.

    Between an optimizer's step and Lightning's counting of it a checkpoint would hold new weights under an old number.
    So inside a step the interrupt waits for its end; a second Ctrl-C does not wait, and writes nothing.
    """

    def __init__(self) -> None:
        self._in_step = False
        self._asked = False
        self._previous: Any = None

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._handle)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._in_step = True

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._in_step = (batch_idx + 1) % trainer.accumulate_grad_batches != 0
        if self._asked and not self._in_step:
            raise KeyboardInterrupt

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if not isinstance(exception, KeyboardInterrupt) or not trainer.training or self._in_step:
            return
        path = Path(trainer.default_root_dir) / "checkpoints" / "last.ckpt"
        trainer.save_checkpoint(path)
        rank_zero_info(
            f"Interrupted after optimizer step {trainer.global_step}; nothing is lost, the checkpoint is {path}. To go "
            f"on, give the same command with --run {trainer.default_root_dir} --ckpt_path last (in Python: "
            f"trainer.fit(…, ckpt_path='{path}'))."
        )

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self._previous = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._in_step and not self._asked:
            self._asked = True
            rank_zero_info("Interrupted: finishing this optimizer step first. Press Ctrl-C again to stop at once.")
            return
        raise KeyboardInterrupt
