"""Train with a curriculum on CPU processes.

``python -m tests.processes.two_curricula ranks FOLDER`` trains in every mode on two processes, and resumes a run.
``python -m tests.processes.two_curricula killed FOLDER`` trains on one process, which kills itself.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lgrpo import Evaluation, Sampling
from lgrpo.callbacks import ExactResume
from lgrpo.data import Measured
from lgrpo.data.partial import PartialRollouts
from lgrpo.run.checkpoints import gather_ranks
from lgrpo.tasks import SortDigits
from tests.helpers import LowDigits, Run, fit

MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "lead": {"lead": 2},
    "overlap": {"overlap": True, "generate_ahead": True},
    "partial": {"partial": PartialRollouts(extra_prompts=4), "sampling": Sampling(max_tokens=6)},
}
RESUMED = "overlap"
"""Mode of the run that is resumed."""
STEP = 5
"""Optimizer step from which it is resumed, inside a cycle."""


class Killed(L.Callback):
    """Kills the process after a step, while the next rollouts are being sampled."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def run(
    mode: str, folder: Path, save: bool = False, kill_at: int | None = None, resume: bool = False, **trainer: Any
) -> Run:
    """Train eight rollouts; optionally save a checkpoint at each step, resume from ``STEP``, or kill the process."""
    callbacks: list[L.Callback] = [ExactResume()]
    if save:
        callbacks.append(ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1))
    if kill_at is not None:
        callbacks.append(Killed(kill_at))
    return fit(
        v=2,
        rollouts=8,
        learning_rate=0.5,
        callbacks=callbacks,
        trainer={"enable_checkpointing": save, "default_root_dir": str(folder), **trainer},
        data={
            "task": SortDigits(num_digits=2, num_held_out=84, reward=LowDigits()),
            "difficulty": Measured(band=(0.2, 0.8), exploration=0.3, replay=0.1),
            "evaluation": Evaluation(success_reward=0.5),
            **MODES[mode],
        },
        ckpt_path=str(folder / f"step={STEP}.ckpt") if resume else None,
    )


def summary(run: Run) -> dict[str, Any]:
    """Return weights, prompts of all ranks and shares of measured prompts."""
    own = [
        (int(position), batch.tokens[row][: int(batch.columns(row).start)].tolist())
        for batch in run.recorder.rollouts
        for row, position in enumerate(batch.positions)
        if row % 4 == 0
    ]
    return {
        "weights": {name: parameter.detach().clone() for name, parameter in run.weights.items()},
        "prompts": sorted(pair for rank in gather_ranks(run.trainer, own) for pair in rank),
        "shares": [row["curriculum/measured_fraction"] for row in run.logged],
    }


def main(command: str, folder: Path) -> None:
    if command == "killed":
        run(RESUMED, folder, save=True, kill_at=STEP + 1)
    devices = {"devices": 2, "strategy": "ddp"}
    found = {}
    for mode in MODES:
        done = run(mode, folder, save=mode == RESUMED, **devices)
        found[mode] = summary(done)
    done = run(RESUMED, folder, resume=True, **devices)
    found["resumed"] = summary(done)
    if done.trainer.is_global_zero:
        torch.save(found, folder / "found")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
