"""A step whose gradient is not a number changes nothing."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import lightning as L
import torch
from jsonargparse.typing import NonNegativeInt, PositiveInt
from torch import Tensor
from torch.distributed.tensor import DTensor

from lgrpo.hooks import policy_owner, run_folder
from lgrpo.types import RolloutBatch


class NonFiniteError(RuntimeError):
    """Step after step had no usable gradient."""


class FiniteSteps(L.Callback):
    """Skips an optimizer step whose gradient is not finite, and keeps its batch for you to look at.

    Weights, momentum and weight decay stay as they were; ``fault/nonfinite_steps`` counts. In 16-bit precision with a
    loss scale the scaler does this itself, and has to.
    """

    def __init__(self, patience: PositiveInt = 10, keep: NonNegativeInt = 5) -> None:
        """
        Args:
            patience: So many skipped steps in a row end the run.
            keep: How many batches are kept, in ``nonfinite/`` in the run folder.
        """
        self.patience = int(patience)
        self.keep = int(keep)
        self._in_a_row = 0
        self._kept = 0
        self._batches: list[RolloutBatch] = []

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: RolloutBatch, batch_idx: int
    ) -> None:
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._batches = []
        self._batches.append(batch)

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        finite = is_finite([p.grad for p in parameters if p.grad is not None])
        if trainer.world_size > 1:  # ranks may hold different parts of it
            finite = trainer.strategy.reduce_boolean_decision(finite, all=True)
        self._in_a_row = 0 if finite else self._in_a_row + 1
        if finite:
            return
        for parameter in parameters:
            parameter.grad = None  # optimizers pass over these
        policy_owner(trainer).note("fault/nonfinite_steps", 1.0)
        kept = self._save(trainer)
        warnings.warn(
            f"step {trainer.global_step} is skipped: its gradient is not finite{kept} ({self._in_a_row} in a row)",
            stacklevel=2,
        )
        if self._in_a_row >= self.patience:
            raise NonFiniteError(
                f"the gradient was not finite {self._in_a_row} steps in a row. Nothing of them is in the weights. Look "
                f"at the batches in {run_folder(trainer) / 'nonfinite'}; lower the learning rate, clip gradients "
                "(trainer.gradient_clip_val), or go on from an earlier checkpoint"
            )

    def state_dict(self) -> dict[str, Any]:
        return {"in_a_row": self._in_a_row, "kept": self._kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._in_a_row, self._kept = state["in_a_row"], state["kept"]

    def _save(self, trainer: L.Trainer) -> str:
        """Writes the step's micro-batches; where, as a part of a sentence."""
        if self._kept >= self.keep:
            return ""
        path = run_folder(trainer) / "nonfinite" / f"step-{trainer.global_step}-rank-{trainer.global_rank}.pt"
        with contextlib.suppress(OSError, RuntimeError):
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"step": trainer.global_step, "batches": [b.state_dict() for b in self._batches]}, path)
            self._kept += 1
            return f", its batch is in {path}"
        return ""


def is_finite(gradients: list[Tensor]) -> bool:
    """Whether every entry is a number; one look at the device for all of them.

    >>> is_finite([torch.ones(2), torch.tensor([1.0, torch.inf])]), is_finite([torch.ones(2)]), is_finite([])
    (False, True, True)
    """
    local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
    local = [g for g in local if g.numel()]
    if not local:
        return True
    largest = torch._foreach_norm([g.detach() for g in local], torch.inf)
    return bool(torch.stack([value.float() for value in largest]).isfinite().all())
