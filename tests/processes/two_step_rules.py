"""Train with rules for the step on two CPU processes: ``python -m tests.processes.two_step_rules ddp|fsdp2 FOLDER``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lgrpo.callbacks import ExactResume
from lgrpo.policy import EffectiveSampleSize, GradientProjection, StepRule
from tests.helpers import Run, build
from tests.processes.two_shards import sharded

RULES = {"sample_size": EffectiveSampleSize, "projection": GradientProjection}


def run(
    rollouts: int = 4,
    v: int = 4,
    i: int = 1,
    rule: StepRule | None = None,
    ckpt_path: Path | None = None,
    callbacks: Sequence[Any] = (),
    **trainer: Any,
) -> Run:
    """Train off-policy with a rule, by default with the learning rate scaled by the effective sample size."""
    done = build(v=v, i=i, rollouts=rollouts, learning_rate=0.3, callbacks=list(callbacks), trainer=trainer)
    done.module.step_rule = rule or EffectiveSampleSize()
    done.trainer.fit(done.module, datamodule=done.data, ckpt_path=ckpt_path and str(ckpt_path))
    return done


def train(kind: str, out: Path) -> None:
    """Train with each rule on two processes, and save the weights under its name; resume it after three steps."""
    for name, rule in [*RULES.items(), ("resumed", GradientProjection)]:
        strategy = "ddp" if kind == "ddp" else sharded(kind)["strategy"]
        settings: dict[str, Any] = {"devices": 2, "strategy": strategy, "enable_checkpointing": name == "projection"}
        callbacks: list[Any] = [ExactResume()]
        if name == "projection":
            callbacks.append(ModelCheckpoint(out, filename="{step}", every_n_train_steps=3, save_top_k=-1))
        checkpoint = out / "step=3.ckpt" if name == "resumed" else None
        done = run(i=2, rule=rule(), ckpt_path=checkpoint, callbacks=callbacks, **settings)
        weights = dict(done.module.policy_weights())  # gathered on both ranks
        if done.trainer.is_global_zero:
            torch.save({key: p.detach().clone() for key, p in weights.items()}, out / f"{name}.pt")
            torch.save([row.get("train/gradient_cosine") for row in done.logged], out / f"{name}-cosines.pt")


if __name__ == "__main__":
    train(sys.argv[1], Path(sys.argv[2]))
