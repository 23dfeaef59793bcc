"""Time a checkpoint and an optimizer step of the demo: ``python -m tests.benchmarks.checkpoint``.

Both are measured in one run, within a cycle, where the behaviour policy's weights are part of the checkpoint. The time
of a checkpoint is that for which training waits. Options of ``lgrpo fit`` are accepted:
``--background_checkpoints false``.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning as L

from lgrpo.cli import main as lgrpo
from lgrpo.hooks import RolloutCallback

ROOT = Path(__file__).parents[2]


class Cost(RolloutCallback):
    """Writes a checkpoint after every step and times both."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.steps: list[float] = []
        self.writes: list[float] = []
        self._started = 0.0

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._started = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        now = time.perf_counter()
        self.steps.append(now - self._started)
        trainer.save_checkpoint(self.path)
        self.writes.append(time.perf_counter() - now)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        step, write = (statistics.median(values[2:]) for values in (self.steps, self.writes))
        size = self.path.stat().st_size / 2**20
        print(f"a checkpoint of {size:.1f} MiB takes {write * 1e3:.0f} ms, an optimizer step {step * 1e3:.0f} ms")
        print(f"ratio to a step {write / step:.2f}")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        options = [
            f"--config={ROOT / 'configs' / 'demo.yaml'}",
            f"--run={folder}/run",
            "--data.num_rollouts=19",
            "--trainer.max_epochs=1",
            "--trainer.limit_val_batches=0",
            "--trainer.enable_progress_bar=false",
            "--trainer.callbacks+=tests.benchmarks.checkpoint.Cost",
            f"--trainer.callbacks.path={folder}/cost.ckpt",
        ]
        lgrpo(["fit", *options, *sys.argv[1:]])


if __name__ == "__main__":
    main()
