"""Saving of a checkpoint on Ctrl-C, SIGTERM, SIGHUP and errors."""

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

from lgrpo.hooks import RolloutCallback, Stage
from lgrpo.run.checkpoints import AtomicCheckpointIO
from lgrpo.types import RolloutBatch

Handler = Callable[[int, FrameType | None], Any] | int | None


class GracefulInterrupt(RolloutCallback):
    """Writes ``last.ckpt`` on Ctrl-C, SIGTERM, SIGHUP, or an error outside an optimizer step; says how to resume.

    Between an optimizer step and Lightning's update of its counter, a checkpoint would hold new weights under the old
    step, and between the hooks of a rollout only some of them would have run. There an interrupt is deferred; a second
    one stops at once and writes nothing. Several ranks stop together at the end of a step. Under SLURM, Lightning's
    plugin writes a checkpoint and requeues the job; that is deferred in the same way.
    """

    order = 1

    def __init__(self) -> None:
        self.saved: Path | None = None
        """Checkpoint written when the run was stopped."""
        self.signal: int | None = None
        """Number of the signal that stopped the run."""
        self._in_step = False
        self._in_rollout_hooks = False
        self._interrupted = False
        self._requeue: list[tuple[Handler, int]] = []
        self._defer = False
        self._previous: dict[int, Handler] = {}

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._in_step = self._in_rollout_hooks = self._interrupted = False
        self.saved = self.signal = None
        self._defer = trainer.world_size > 1
        self._listen(signal.SIGINT, self._handle)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it on purpose
            self._listen(signal.SIGHUP, self._handle)

    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._listen(signal.SIGTERM, self._handle)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        environment = trainer._accelerator_connector.cluster_environment
        if not isinstance(environment, SLURMEnvironment) or not environment.auto_requeue:
            self._listen(signal.SIGTERM, self._handle)
        elif environment.requeue_signal is not None:  # Lightning's handler would write a checkpoint inside a step
            self._listen(environment.requeue_signal, self._handle_requeue)

    def on_stage(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: Stage) -> None:
        if stage != "update":  # at its start other callbacks write files, once per rollout
            self._in_step = self._in_rollout_hooks = False
            self._stop_if_interrupted(trainer)

    def on_rollout_end(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: RolloutBatch) -> None:
        self._in_rollout_hooks = True

    def on_rollout_start(self, trainer: L.Trainer, pl_module: L.LightningModule, rollout: int) -> None:
        self._in_step = True  # the sync is done, the other callbacks' hooks follow

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._in_step = self._in_rollout_hooks = False
            self._stop_if_interrupted(trainer, together=True)
        self._in_step = True

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._in_step = (batch_idx + 1) % trainer.accumulate_grad_batches != 0

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._stop_if_interrupted(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._stop_if_interrupted(trainer)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        started = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking and trainer.global_step > 0
        all_ranks_stop = trainer.world_size == 1 or isinstance(exception, KeyboardInterrupt)
        if self._in_step or not started or not all_ranks_stop:
            return
        path = self._folder(trainer) / "last.ckpt"
        try:
            trainer.save_checkpoint(path)
            checkpoint_io = trainer.strategy.checkpoint_io
            if isinstance(checkpoint_io, AtomicCheckpointIO):
                checkpoint_io.wait()
                if checkpoint_io.failed is not None:
                    raise OSError("see the warning above")
        except Exception as error:  # must not hide the error that stopped the run
            rank_zero_info(
                f"Stopped after optimizer step {trainer.global_step}; no checkpoint could be written: {error}"
            )
            return
        self.saved = path
        rank_zero_info(
            f"Stopped after optimizer step {trainer.global_step}; nothing is lost, the checkpoint is {path}. To "
            f"resume, use the same command with --run {trainer.default_root_dir} --ckpt_path last (in Python: "
            f"trainer.fit(…, ckpt_path='{path}'))."
        )

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        for number, handler in self._previous.items():
            if signal.getsignal(number) in (self._handle, self._handle_requeue):  # Lightning restores its handlers
                signal.signal(number, handler)
        self._previous = {}

    def _listen(self, number: int, handler: Callable[[int, FrameType | None], None]) -> None:
        if threading.current_thread() is threading.main_thread() and signal.getsignal(number) != handler:
            previous = signal.signal(number, handler)
            self._previous.setdefault(number, previous)

    def _stop_if_interrupted(self, trainer: L.Trainer, together: bool = False) -> None:
        if self._requeue and (together or not self._defer):
            requests, self._requeue = self._requeue, []
            for handler, number in requests:
                if callable(handler):
                    handler(number, None)
        if self._defer:  # the ranks decide together, once per step
            interrupted = together and trainer.strategy.reduce_boolean_decision(self._interrupted, all=False)
        else:
            interrupted = self._interrupted
        if interrupted:
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        if self._must_wait and not self._interrupted:
            self._interrupted = True
            rank_zero_info("Interrupted: finishing this optimizer step first. Press Ctrl-C again to stop at once.")
            return
        raise KeyboardInterrupt

    def _handle_requeue(self, number: int, frame: FrameType | None) -> None:
        handler = self._previous.get(number)
        if self._must_wait:
            self._requeue.append((handler, number))
        elif callable(handler):
            handler(number, frame)

    @property
    def _must_wait(self) -> bool:
        """Whether a checkpoint written now could not be resumed from."""
        return self._in_step or self._in_rollout_hooks or self._defer

    @staticmethod
    def _folder(trainer: L.Trainer) -> Path:
        """Return the folder that ``ckpt_path='last'`` refers to."""
        checkpoint = trainer.checkpoint_callback
        if isinstance(checkpoint, ModelCheckpoint) and checkpoint.dirpath:
            return Path(checkpoint.dirpath)
        return Path(trainer.default_root_dir) / "checkpoints"
