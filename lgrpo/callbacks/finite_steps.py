"""Skipping of optimizer steps whose gradient is not finite."""

from __future__ import annotations

import contextlib
import math
import warnings
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.precision import FSDPPrecision, MixedPrecision
from torch import Tensor
from torch.distributed.tensor import DTensor

from lgrpo.checks import check_count
from lgrpo.hooks import policy_owner, rollout_owner
from lgrpo.run.folder import run_folder


class NonFiniteError(RuntimeError):
    """Too many consecutive steps had a gradient that was not finite."""


class FiniteSteps(L.Callback):
    """Skips an optimizer step whose gradient is not finite, and saves its batch for inspection.

    Weights and optimizer state do not change; ``fault/nonfinite_steps`` counts the skipped steps, and
    ``train/grad_norm`` is infinite or NaN. In 16-bit precision the gradient scaler skips such steps instead, and must
    see them.
    """

    def __init__(self, patience: int = 10, keep: int = 5) -> None:
        """
        Args:
            patience: Number of consecutive skipped steps that ends the run.
            keep: Largest number of batches to save, in ``nonfinite/`` in the run folder.
        """
        check_count("finite_steps.patience", patience, at_least=1)
        check_count("finite_steps.keep", keep, at_least=0)
        self.patience = patience
        self.keep = keep
        self._in_a_row = 0
        self._kept = 0

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        plugin = trainer.precision_plugin
        if isinstance(plugin, MixedPrecision | FSDPPrecision) and plugin.scaler is not None:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norm = largest_entry([p.grad for p in parameters if p.grad is not None])
        finite = math.isfinite(norm)
        if trainer.world_size > 1:  # ranks may hold different shards
            finite = trainer.strategy.reduce_boolean_decision(finite, all=True)
        self._in_a_row = 0 if finite else self._in_a_row + 1
        if finite:
            return
        for parameter in parameters:
            parameter.grad = None  # optimizers skip parameters without a gradient
        total = trainer.strategy.reduce(torch.tensor(norm, device=pl_module.device), reduce_op="sum")
        policy_owner(trainer).add_metric("fault/nonfinite_steps", 1.0)
        policy_owner(trainer).add_metric("train/grad_norm", float(total))
        kept = self._save(trainer)
        warnings.warn(
            f"step {trainer.global_step} is skipped: its gradient is not finite{kept} ({self._in_a_row} in a row)",
            stacklevel=2,
        )
        if self._in_a_row >= self.patience:
            raise NonFiniteError(
                f"the gradient was not finite {self._in_a_row} steps in a row. They did not change the "
                f"weights. Inspect the batches in {run_folder(trainer) / 'nonfinite'}; lower the learning rate, clip "
                "gradients (trainer.gradient_clip_val), or resume from an earlier checkpoint"
            )

    def state_dict(self) -> dict[str, Any]:
        return {"in_a_row": self._in_a_row, "kept": self._kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._in_a_row, self._kept = state["in_a_row"], state["kept"]

    def _save(self, trainer: L.Trainer) -> str:
        """Save the step's micro-batches; return where, as a clause of a message."""
        if self._kept >= self.keep:
            return ""
        path = run_folder(trainer) / "nonfinite" / f"step-{trainer.global_step}-rank-{trainer.global_rank}.pt"
        with contextlib.suppress(OSError, RuntimeError):
            path.parent.mkdir(parents=True, exist_ok=True)
            batches = [batch.state_dict() for batch in rollout_owner(trainer).micro_batches]
            torch.save({"step": trainer.global_step, "batches": batches}, path)
            self._kept += 1
            return f", its batch is in {path}"
        return ""


def largest_entry(gradients: list[Tensor]) -> float:
    """Return the largest absolute value, or NaN if an entry is NaN, with a single device synchronisation.

    >>> largest_entry([torch.ones(2), torch.tensor([-3.0])]), largest_entry([])
    (3.0, 0.0)
    >>> largest_entry([torch.ones(2), torch.tensor([1.0, torch.inf])]), largest_entry([torch.tensor([torch.nan])])
    (inf, nan)
    """
    local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
    local = [g for g in local if g.numel()]
    if not local:
        return 0.0
    largest = torch._foreach_norm([g.detach() for g in local], torch.inf)
    return float(torch.stack([value.float() for value in largest]).max())
