"""Ctrl-C, SIGTERM and errors that lose nothing."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info

from lgrpo.checkpoints import WholeCheckpointIO
from lgrpo.hooks import RolloutCallback, Stage
from lgrpo.types import RolloutBatch

Handler = Callable[[int, FrameType | None], Any] | int | None


class GracefulInterrupt(RolloutCallback):
    """On Ctrl-C, on SIGTERM, or an error outside of an optimizer step: writes ``last.ckpt``, and says how to go on.

    Between an optimizer's step and Lightning's counting of it a checkpoint would hold new weights under an old number,
    and between the hooks of a rollout some would have run and some not. So there an interrupt waits; a second one
    does not, and writes nothing. Several ranks stop together, at the end of a step. Under SLURM, Lightning's own plugin
    writes a checkpoint and requeues the job; that too waits for such a moment.
    """

    order = 1

    def __init__(self) -> None:
        self.saved: Path | None = None
        """The checkpoint that was written when the run was stopped."""
        self.signal: int | None = None
        """What stopped the run."""
        self._busy = False
        self._is_written = False
        """Whether a rollout is at hand of which callbacks write, once: until they are done, an interrupt waits."""
        self._asked = False
        self._requeue: list[tuple[Handler, int]] = []
        self._defer = False
        self._previous: dict[int, Handler] = {}

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._busy = self._is_written = self._asked = False
        self.saved = self.signal = None
        self._defer = trainer.world_size > 1
        self._listen(signal.SIGINT, self._handle)

    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._listen(signal.SIGTERM, self._handle)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        environment = trainer._accelerator_connector.cluster_environment
        if not isinstance(environment, SLURMEnvironment) or not environment.auto_requeue:
            self._listen(signal.SIGTERM, self._handle)
        elif environment.requeue_signal is not None:  # Lightning's handler would write a checkpoint inside a step
            self._listen(environment.requeue_signal, self._handle_requeue)

    def on_stage(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: Stage) -> None:
        if stage != "update":  # then callbacks write
            self._busy = self._is_written = False
            self._stop_if_asked(trainer)

    def on_rollout_end(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: RolloutBatch) -> None:
        self._is_written = True

    def on_rollout_start(self, trainer: L.Trainer, pl_module: L.LightningModule, rollout: int) -> None:
        self._busy = True  # the sync is done, the other hooks come now

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._busy = self._is_written = False
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
            checkpoint_io = trainer.strategy.checkpoint_io
            if isinstance(checkpoint_io, WholeCheckpointIO) and checkpoint_io.failed is not None:
                raise OSError("see above")
        except Exception as error:  # the first error is the one to see
            rank_zero_info(
                f"Stopped after optimizer step {trainer.global_step}; no checkpoint could be written: {error}"
            )
            return
        self.saved = path
        rank_zero_info(
            f"Stopped after optimizer step {trainer.global_step}; nothing is lost, the checkpoint is {path}. To go on, "
            f"give the same command with --run {trainer.default_root_dir} --ckpt_path last (in Python: trainer.fit(…, "
            f"ckpt_path='{path}'))."
        )

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        for number, handler in self._previous.items():
            if signal.getsignal(number) in (self._handle, self._handle_requeue):  # Lightning puts its own back itself
                signal.signal(number, handler)
        self._previous = {}

    def _listen(self, number: int, handler: Callable[[int, FrameType | None], None]) -> None:
        if threading.current_thread() is threading.main_thread() and signal.getsignal(number) != handler:
            previous = signal.signal(number, handler)
            self._previous.setdefault(number, previous)

    def _stop_if_asked(self, trainer: L.Trainer, together: bool = False) -> None:
        if self._requeue and (together or not self._defer):
            requests, self._requeue = self._requeue, []
            for handler, number in requests:
                if callable(handler):
                    handler(number, None)
        if self._defer:  # the ranks decide together, once a step
            asked = together and trainer.strategy.reduce_boolean_decision(self._asked, all=False)
        else:
            asked = self._asked
        if asked:
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        if (self._busy or self._is_written or self._defer) and not self._asked:
            self._asked = True
            rank_zero_info("Interrupted: finishing this optimizer step first. Press Ctrl-C again to stop at once.")
            return
        raise KeyboardInterrupt

    def _handle_requeue(self, number: int, frame: FrameType | None) -> None:
        handler = self._previous.get(number)
        if self._busy or self._is_written or self._defer:
            self._requeue.append((handler, number))
        elif callable(handler):
            handler(number, frame)

    @staticmethod
    def _folder(trainer: L.Trainer) -> Path:
        """Where ``ckpt_path='last'`` will look."""
        checkpoint = trainer.checkpoint_callback
        if isinstance(checkpoint, ModelCheckpoint) and checkpoint.dirpath:
            return Path(checkpoint.dirpath)
        return Path(trainer.default_root_dir) / "checkpoints"
