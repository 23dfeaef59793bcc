"""Train with an advantage for each turn on two CPU processes: ``python -m tests.processes.two_turns FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from lgrpo.advantages import TurnAdvantage
from lgrpo.environments import Environment, Turn
from tests.engines.test_environment import data_of
from tests.helpers import Run, fit


class Uneven(Environment):
    """Episodes have one turn or up to three, by the prompt, so that ranks differ in the number of turns."""

    def reset(self, row: dict[str, Any]) -> None:
        self.num_turns = 1 if row["question"][0] in "01234" else 3

    def step(self, text: str) -> Turn:
        self.num_turns -= 1
        reward = sum(c in "01234" for c in text) / 6
        return Turn(f"{text[:1]}>", reward, done=self.num_turns == 0)


def run(**trainer: Any) -> Run:
    return fit(
        v=2, rollouts=6, data=data_of(Uneven()) | {"advantage": TurnAdvantage(), "num_prompts": 2}, trainer=trainer
    )


if __name__ == "__main__":
    done = run(devices=2, strategy="ddp")
    name = f"{done.trainer.global_rank}.pt"
    turns = [int((batch.turn_rewards != 0).sum(1).max()) for batch in done.recorder.rollouts]
    shares = [row["rollout/turn_signal_fraction"] for row in done.logged]
    torch.save({"weights": done.weights, "turns": turns, "shares": shares}, Path(sys.argv[1]) / name)
