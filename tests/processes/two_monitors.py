"""Run with a measured v on one or two CPU processes: ``python -m tests.processes.two_monitors DEVICES OUT``."""

from __future__ import annotations

import sys

import torch

from lgrpo import AdaptiveWeightSync, ImprovementMonitor
from tests.helpers import build


def main() -> None:
    devices, out = int(sys.argv[1]), sys.argv[2]
    trainer = {"devices": devices, "accumulate_grad_batches": 2, "limit_val_batches": 1.0}
    if devices > 1:
        trainer["strategy"] = "ddp"
    callbacks = [AdaptiveWeightSync(budget=0.45, hysteresis=0.0), ImprovementMonitor(1, num_held_out=7)]
    run = build(v=0, i=2, rollouts=6, learning_rate=0.2, callbacks=callbacks, trainer=trainer)
    run.trainer.fit(run.module, datamodule=run.data)
    if run.trainer.is_global_zero:
        syncs = [record.step for record in run.data.engine.state.ledger]
        torch.save({"logged": run.logged[-1], "syncs": syncs, "world_size": run.trainer.world_size}, out)


if __name__ == "__main__":
    main()
