"""A checkpoint, wherever it was taken, goes on from the last finished optimizer step."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch


class ExactResume(L.Callback):
    """Rewrites a checkpoint's loop counters as they stand right after its last finished optimizer step.

    Lightning repairs only checkpoints saved in ``on_train_batch_end`` at the end of a step. From anywhere else (inside
    gradient accumulation, an interrupt, an epoch's end) gradients or a batch would be lost. Rewinding is exact here,
    since neither rollout nor weights change inside a step.
    """

    def __init__(self, seed: int = 0) -> None:
        """
        Args:
            seed: Of dropout, where the policy has any: keyed by step and micro-batch instead of saved.
        """
        self.seed = seed

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        step = checkpoint["global_step"]
        if step == 0:  # nothing was trained: begin afresh
            checkpoint["loops"].pop("fit_loop", None)
            return
        loops = checkpoint["loops"]["fit_loop"]
        epoch, batch = loops["epoch_progress"], loops["epoch_loop.batch_progress"]
        surplus = batch["current"]["processed"] % trainer.accumulate_grad_batches
        batch["is_last_batch"] &= surplus == 0 and batch["current"]["processed"] == batch["current"]["ready"]
        for count in (batch["current"], batch["total"]):
            done = count["processed"] - surplus
            count.update(ready=done, started=done, processed=done, completed=done - 1)
        for count in (epoch["current"], epoch["total"]):
            started = count["started"]
            count.update(ready=started, processed=started - 1, completed=started - 1)
        loops["epoch_loop.state_dict"]["_batches_that_stepped"] = step - 1

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.num_training_batches % trainer.accumulate_grad_batches:
            raise ValueError(
                f"an epoch of {trainer.num_training_batches} batches is not a whole number of optimizer steps of "
                f"{trainer.accumulate_grad_batches} micro-batches: mend trainer.limit_train_batches"
            )

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        micro_batch = batch_idx % trainer.accumulate_grad_batches
        torch.manual_seed(hash((self.seed, trainer.global_rank, trainer.global_step, micro_batch)) % 2**63)
