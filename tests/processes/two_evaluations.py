"""Validate on one or two CPU processes: ``python -m tests.processes.two_evaluations DEVICES OUT FOLDER``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from lgrpo import Benchmark, Evaluation
from lgrpo.tasks import SortDigits
from tests.helpers import LowDigits, build


def main() -> None:
    devices, out, folder = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    other = SortDigits(num_digits=3, num_held_out=9, reward=LowDigits())
    run = build(
        data={
            "evaluation": Evaluation(num_problems=11, success_reward=0.5, num_samples=4, results="jsonl"),
            "benchmarks": {"other": Benchmark(task=other, num_samples=2, success_reward=0.4)},
        },
        trainer={
            "devices": devices,
            "strategy": "ddp" if devices > 1 else "auto",
            "limit_val_batches": 1.0,
            "default_root_dir": folder,
        },
    )
    (metrics,) = run.trainer.validate(run.module, datamodule=run.data, verbose=False)
    if run.trainer.is_global_zero:
        out.write_text(json.dumps(metrics))


if __name__ == "__main__":
    main()
