"""Refresh of the reference from the policy."""

from __future__ import annotations

from typing import Any

import lightning as L

from lgrpo.checks import check_count, check_range
from lgrpo.hooks import policy_owner, rollout_owner


class ReferenceRefresh(L.Callback):
    """Refreshes the reference at the start of each stage, or every ``period`` rollouts."""

    def __init__(self, period: int | None = None, decay: float = 0.0) -> None:
        """
        Args:
            period: Number of rollouts between two refreshes. By default one stage, that is one Lightning epoch.
            decay: Weight of the old reference: 0 copies the policy, 0.99 is a slow moving average.
        """
        check_count("reference_refresh.period", period, at_least=1, reason="it is a number of rollouts")
        check_range("reference_refresh.decay", decay, at_least=0, below=1)
        self.period = period
        self.decay = decay
        self._refreshed_at = 0
        """Step of the last refresh: a checkpoint saved inside a step rewinds to its start, where it was refreshed."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._refreshed_at = 0
        if stage == "fit" and not policy_owner(trainer).loss.needs_reference:
            raise ValueError(
                "ReferenceRefresh has no reference to refresh: kl_coef is 0, so none is kept (or the loss has no "
                "ReferenceKL). Give the loss a KL term, or leave the callback out (reference_refresh: null)"
            )

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Refresh before the first optimizer step of a stage or period. Sampling may be ahead of it by the lead."""
        step = trainer.global_step
        if step in (0, self._refreshed_at) or batch_idx % trainer.accumulate_grad_batches:
            return
        if self.period is None:
            period = int(trainer.num_training_batches) // trainer.accumulate_grad_batches
        else:
            period = self.period * rollout_owner(trainer).reuse
        if step % period == 0:
            policy_owner(trainer).refresh_reference(self.decay)
            self._refreshed_at = step

    def state_dict(self) -> dict[str, Any]:
        return {"refreshed_at": self._refreshed_at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._refreshed_at = state_dict["refreshed_at"]
