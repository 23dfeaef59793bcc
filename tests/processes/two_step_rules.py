"""Train with a rule for the step on two CPU processes: ``python -m tests.processes.two_step_rules OUT``."""

from __future__ import annotations

import sys
from typing import Any

import torch

from lgrpo.policy import EffectiveSampleSize
from tests.helpers import Run, build


def run(rollouts: int = 4, v: int = 4, **trainer: Any) -> Run:
    """Train off-policy, with the learning rate scaled by the effective sample size."""
    done = build(v=v, rollouts=rollouts, learning_rate=0.3, trainer=trainer)
    done.module.step_rule = EffectiveSampleSize()
    done.trainer.fit(done.module, datamodule=done.data)
    return done


if __name__ == "__main__":
    done = run(devices=2, strategy="ddp")
    if done.trainer.is_global_zero:
        torch.save({name: p.detach().clone() for name, p in done.weights.items()}, sys.argv[1])
