"""Precision of the arithmetic and of the weights."""

from __future__ import annotations

import lightning as L
import torch

COMPUTE_DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
"""Compute dtype by ``trainer.precision``, where it differs from the dtype of the weights."""


def compute_dtype(trainer: L.Trainer | None) -> torch.dtype | None:
    """Return the dtype of the trainer's matrix products on a GPU; None if it is the dtype of the weights.

    Always None without a Trainer, and on a CPU, which may not support the lower precision.
    """
    if trainer is None or trainer.strategy.root_device.type != "cuda":
        return None
    return COMPUTE_DTYPES.get(str(trainer.precision))


def check_precision(trainer: L.Trainer) -> None:
    """Raise a ``ValueError`` if ``trainer.precision`` would round the tensors of a batch."""
    precision = str(trainer.precision)
    if precision in ("bf16-true", "16-true") or precision.startswith("transformer-engine"):
        raise ValueError(
            f"trainer.precision {precision} rounds every float of a batch, behaviour log-probabilities too: "
            "-7.123456 becomes -7.125, and the ratio is wrong at lag 0. Use bf16-mixed"
        )
