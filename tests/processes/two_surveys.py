"""Train M2PO on two CPU processes and save the weights: ``python -m tests.processes.two_surveys OUT``."""

from __future__ import annotations

import sys
from typing import Any

import torch

from lgrpo.losses import ComposedLoss, Importance, SecondMoment
from tests.helpers import Run, fit


def run(**trainer: Any) -> Run:
    """Train three rollouts, two steps each, with a budget that drops tokens."""
    loss = ComposedLoss(gate=SecondMoment(limit=1e-4), weight=Importance())
    return fit(v=3, i=2, rollouts=3, loss=loss, learning_rate=0.3, trainer=trainer)


if __name__ == "__main__":
    done = run(devices=2, strategy="ddp")
    if done.trainer.is_global_zero:
        torch.save({name: p.detach().clone() for name, p in done.weights.items()}, sys.argv[1])
