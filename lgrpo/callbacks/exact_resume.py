"""Resuming from the last finished optimizer step, wherever the checkpoint was taken."""

from __future__ import annotations

import warnings
from typing import Any

import lightning as L
import torch

from lgrpo.hooks import policy_owner
from lgrpo.run.background import BackgroundCheckpointIO
from lgrpo.run.checkpoints import AtomicCheckpointIO, can_write_in_background, write_atomically
from lgrpo.run.resume import ResumeError


class ExactResume(L.Callback):
    """Sets a checkpoint's loop counters to their values right after its last finished optimizer step.

    Lightning corrects only checkpoints saved in ``on_train_batch_end`` at the end of a step. From anywhere else (inside
    gradient accumulation, after an interrupt, at an epoch's end) gradients or a batch would be lost. Rewinding is
    exact, because neither the rollout nor the weights change inside a step.
    """

    def __init__(self, seed: int = 0, background: bool = True) -> None:
        """
        Args:
            seed: Seed of torch's random numbers, which are derived from step and micro-batch instead of saved.
            background: Write checkpoints in a thread: training waits only for a copy in host memory. A checkpoint may
                be incomplete when ``trainer.save_checkpoint`` returns; it is complete when ``fit`` returns.
        """
        self.seed, self.background = seed, background
        self._failures = 0
        self._validated = -1
        self._validation_is_due = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit":
            write_atomically(trainer)
            if self.background and can_write_in_background(trainer):
                trainer.strategy.checkpoint_io = BackgroundCheckpointIO()
            if isinstance(trainer.strategy.checkpoint_io, BackgroundCheckpointIO):
                trainer.strategy.checkpoint_io.start()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if isinstance(trainer.strategy.checkpoint_io, BackgroundCheckpointIO):
            try:
                trainer.strategy.checkpoint_io.wait()
            except Exception as error:  # must not hide the error that stopped the run
                warnings.warn(f"a checkpoint could not be written: {type(error).__name__}: {error}", stacklevel=1)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._validated = trainer.global_step

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        loop, fetcher = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
        is_due = trainer.global_step > 0 and fetcher is not None and loop._should_check_val_fx(fetcher)
        checkpoint["validation_is_due"] = is_due and self._validated != trainer.global_step

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        data = trainer.datamodule  # type: ignore[attr-defined]
        if type(data).__qualname__ not in checkpoint:  # Lightning would ignore this
            raise ResumeError(
                f"the checkpoint holds no state of a {type(data).__qualname__}, so no rollout to continue with"
            )
        self._validation_is_due = checkpoint["validation_is_due"]
        step = checkpoint["global_step"]
        if step == 0:  # nothing was trained: start from the beginning
            checkpoint["loops"].pop("fit_loop", None)
            return
        loops = checkpoint["loops"]["fit_loop"]
        epoch, batch = loops["epoch_progress"], loops["epoch_loop.batch_progress"]
        before = checkpoint["grpo"]["settings"]["trainer.accumulate_grad_batches"]
        surplus = batch["current"]["processed"] % before
        batch["is_last_batch"] &= surplus == 0 and batch["current"]["processed"] == batch["current"]["ready"]
        for count in (batch["current"], batch["total"]):
            done = (count["processed"] - surplus) // before * trainer.accumulate_grad_batches
            count.update(ready=done, started=done, processed=done, completed=done - 1)
        for count in (epoch["current"], epoch["total"]):
            started = count["started"]
            count.update(ready=started, processed=started - 1, completed=started - 1)
        loops["epoch_loop.state_dict"]["_batches_that_stepped"] = step - 1

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.global_step:
            warn_about_optimizer(trainer)
        if self._validation_is_due:  # the process ended between a step and its validation, which Lightning would skip
            self._validation_is_due = False
            trainer.validating = True
            trainer.fit_loop.epoch_loop.val_loop.run()
            trainer.training = True
        if trainer.global_step:
            count_next_epoch(trainer)  # after the validation, because a checkpoint may be saved in it

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        micro_batch = batch_idx % trainer.accumulate_grad_batches
        checkpoint_io = trainer.strategy.checkpoint_io
        if isinstance(checkpoint_io, BackgroundCheckpointIO):
            checkpoint_io.report()
        if isinstance(checkpoint_io, AtomicCheckpointIO) and checkpoint_io.num_failures > self._failures:
            policy_owner(trainer).add_metric("fault/checkpoint_writes", checkpoint_io.num_failures - self._failures)
            self._failures = checkpoint_io.num_failures
        torch.manual_seed(hash((self.seed, trainer.global_rank, trainer.global_step, micro_batch)) % 2**63)


def count_next_epoch(trainer: L.Trainer) -> None:
    """Count the epoch that follows a checkpoint taken at the end of an epoch, which Lightning starts without counting.

    Later checkpoints would hold too few epochs, and a run resumed from one of them would train for longer.
    """
    loop = trainer.fit_loop
    current: Any = loop.epoch_progress.current
    if loop.restarted_mid_epoch and current.processed == current.started and not loop.done:
        loop.epoch_progress.increment_ready()
        loop.epoch_progress.increment_started()


def warn_about_optimizer(trainer: L.Trainer) -> None:
    """Warn if the optimizer's settings in the checkpoint, which are used, differ from the configured ones."""
    for optimizer in trainer.optimizers:
        group, configured = optimizer.param_groups[0], optimizer.defaults
        used = {name: group.get(f"initial_{name}", group.get(name)) for name in configured}
        if ignored := [f"{n} {v} (not {configured[n]})" for n, v in used.items() if _differs(v, configured[n])]:
            warnings.warn(f"the optimizer keeps its settings from the checkpoint: {', '.join(ignored)}", stacklevel=2)


def _differs(used: Any, configured: Any) -> bool:
    return isinstance(configured, int | float) and isinstance(used, int | float) and used != configured
