"""Kill one of two ranks while the other is outside collectives: ``python -m tests.processes.two_deaths RANK``."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from lgrpo import RolloutCallback
from lgrpo.callbacks import RankWatch
from tests.helpers import build


class KillRank(RolloutCallback):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_rollout_start(self, trainer: Any, pl_module: Any, rollout: int) -> None:
        if rollout == 2:
            os.write(1, f"process {os.getpid()}\n".encode())  # one write: both ranks share the pipe
            if trainer.global_rank == self.rank:
                time.sleep(1)
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(600)


def main() -> None:
    run = build(callbacks=[KillRank(int(sys.argv[1])), RankWatch()], trainer={"devices": 2, "strategy": "ddp"})
    run.trainer.fit(run.module, datamodule=run.data)


if __name__ == "__main__":
    main()
