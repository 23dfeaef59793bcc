"""Train with a judge on one or two CPU processes: ``python -m tests.processes.two_judges DEVICES URL FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from lgrpo import RolloutRecorder
from lgrpo.rewards import JudgeReward, Question, Scoring
from lgrpo.tasks import SortDigits
from tests.helpers import build


def main(devices: int, url: str, folder: Path) -> None:
    template = Question("{prompt}|{completion}", r"Rating: (0\.\d)")
    reward = JudgeReward(url, template, verdicts=str(folder / "verdicts"), model="judge", retry_delay=0.0)
    run = build(
        rollouts=2,
        callbacks=[RolloutRecorder(path=str(folder / "rollouts"))],
        trainer={"devices": devices} | ({"strategy": "ddp"} if devices > 1 else {}),
        data={
            "task": SortDigits(num_digits=2, num_held_out=20, reward=reward),
            "scoring": Scoring(num_workers=1, timeout=60),
        },
    )
    run.trainer.fit(run.module, datamodule=run.data)
    if run.trainer.is_global_zero:
        weights = {name: parameter.clone() for name, parameter in run.weights.items()}
        torch.save({"weights": weights, "logged": run.logged}, folder / "state")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
