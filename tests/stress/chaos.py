"""Kill a run repeatedly at random moments of every stage and compare its result with an undisturbed run.

``python -m tests.stress.chaos --kills 30`` (``make chaos``). Each attempt is a separate process, forked from one that
has finished its imports, and killed with SIGKILL.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import lightning as L
import torch

from lgrpo.cli import main as lgrpo
from lgrpo.hooks import RolloutCallback, Stage
from lgrpo.report import read_series

ROOT = Path(__file__).parents[2]
MOMENTS = ("sync", "generate", "score", "update", "checkpoint", "validate")
LIMIT = 600  # seconds for an attempt


class StageReporter(RolloutCallback):
    """Write each stage to a pipe, so that the parent process can kill the run in it."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def report(self, stage: str) -> None:
        os.write(self.descriptor, f"{stage}\n".encode())

    def on_stage(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: Stage) -> None:
        self.report(stage)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self.report("checkpoint")

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.report("validate")


def options(run: Path, rollouts: int) -> list[str]:
    """Return options of a run over two epochs with v = 4, i = 2, two micro-batches and a checkpoint per step."""
    return [
        f"--config={ROOT / 'configs' / 'tiny.yaml'}",
        f"--run={run}",
        f"--data.num_rollouts={rollouts // 2}",
        "--trainer.max_epochs=2",
        "--data.reuse=2",
        "--weight_sync.period=4",
        "--trainer.accumulate_grad_batches=2",
        "--reference_refresh.period=3",
        "--reference_refresh.decay=0.5",
        "--validate_every=lgrpo.ValidateEvery",
        "--validate_every.rollouts=5",
        "--data.evaluation.num_problems=8",
        "--data.evaluation.num_samples=2",
        "--data.num_prompts=4",
        "--data.group_size=4",
        "--checkpoint.every_n_train_steps=1",
        "--trainer.logger=lgrpo.run.metrics_logger.MetricsLogger",
        f"--trainer.logger.save_dir={run}",
        "--trainer.logger.name=metrics",
        "--trainer.enable_progress_bar=false",
    ]


def attempt(arguments: list[str], log: Path, kill_at: tuple[str, int, float] | None) -> int:
    """Run ``lgrpo fit`` in a fork and return the signal that ended it, or 0.

    Args:
        arguments: Arguments of ``lgrpo fit``.
        log: File for its output.
        kill_at: Stage, number of its occurrence, and seconds after its start at which to kill the process.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        with log.open("a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        code = 1
        try:
            reporter = [
                "--trainer.callbacks+=tests.stress.chaos.StageReporter",
                f"--trainer.callbacks.descriptor={writer}",
            ]
            lgrpo(["fit", *arguments, *reporter])
            code = 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
            print(error)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(code)
    os.close(writer)
    seen: Counter[str] = Counter()
    deadline = time.monotonic() + LIMIT
    with os.fdopen(reader, "rb", buffering=0) as file:
        while select.select([file], [], [], max(0.0, deadline - time.monotonic()))[0]:
            received = file.read(4096)
            if not received:
                break
            seen.update(received.decode().split())
            if kill_at is not None and seen[kill_at[0]] >= kill_at[1]:
                time.sleep(kill_at[2])
                os.kill(pid, signal.SIGKILL)
                break
        else:
            os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"an attempt did not end within {LIMIT} s:\n{log.read_text()[-3000:]}")
    _, status = os.waitpid(pid, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) != 0:
        raise AssertionError(f"an attempt ended with {os.WEXITSTATUS(status)}:\n{log.read_text()[-3000:]}")
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def chaos(folder: Path, kills: int, rollouts: int, seed: int) -> dict[str, int]:
    """Train with and without kills, compare the results, and return the number of kills per stage."""
    rng = random.Random(seed)
    straight, broken = folder / "straight", folder / "broken"
    attempt(options(straight, rollouts), folder / "straight.log", None)
    killed: Counter[str] = Counter()
    for count in range(kills):
        moment = MOMENTS[count % len(MOMENTS)]
        kill_at = (moment, rng.randint(1, 1 if moment == "validate" else 3), rng.choice([0.0, 0.002, 0.01, 0.04]))
        can_resume = any((broken / "checkpoints").glob("*.ckpt"))
        if not can_resume and broken.exists():  # killed before the first checkpoint: start again
            broken.rename(folder / f"too-early-{count}")
        resume = ["--ckpt_path=last"] if can_resume else []
        if attempt([*options(broken, rollouts), *resume], folder / "broken.log", kill_at) == 0:
            break  # the run finished
        killed[moment] += 1
    attempt([*options(broken, rollouts), "--ckpt_path=last"], folder / "broken.log", None)
    compare(straight, broken)
    return dict(killed)


def compare(straight: Path, broken: Path) -> None:
    """Check that weights, optimizer, metrics, sync ledger and logged completions are identical."""
    ends = [torch.load(run / "checkpoints" / "last.ckpt", weights_only=True) for run in (straight, broken)]
    assert ends[0]["global_step"] == ends[1]["global_step"]
    for name, tensor in ends[0]["state_dict"].items():
        assert torch.equal(tensor, ends[1]["state_dict"][name]), name
    states = [end["optimizer_states"][0]["state"] for end in ends]
    for index, values in states[0].items():
        for name, tensor in values.items():
            assert torch.equal(tensor, states[1][index][name]), (index, name)
    expected, got = read_series(straight), read_series(broken)
    assert expected.keys() == got.keys()
    for name in expected:
        if not name.startswith("time/"):
            assert expected[name] == got[name], name
    for name, ignored in (("syncs.jsonl", {"seconds"}), ("completions.jsonl", set())):
        rows = []
        for run in (straight, broken):
            lines = (run / name).read_text(encoding="utf-8").splitlines()
            rows.append([{k: v for k, v in json.loads(line).items() if k not in ignored} for line in lines])
        assert rows[0] == rows[1], name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--rollouts", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        killed = chaos(Path(folder), arguments.kills, arguments.rollouts, arguments.seed)
    print(
        f"killed {sum(killed.values())} times ({killed}), in {time.perf_counter() - started:.0f} s: identical results"
    )


if __name__ == "__main__":
    main()
