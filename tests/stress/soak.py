"""Train for a long time under constant faults and check that the use of resources stays flat.

``python -m tests.stress.soak --rollouts 2000`` (``make soak``): vLLM servers are killed, rewards hang, crash and raise,
reward workers are killed, the run itself gets SIGTERM and resumes. Memory, file handles, threads and processes must be
flat over the last half, and nothing may be left running afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L

from lgrpo.commands import RESUMABLE
from lgrpo.engines import VLLMServerEngine
from lgrpo.hooks import RolloutCallback
from lgrpo.report import read_series
from lgrpo.rewards import Reward
from lgrpo.types import Completion, Prompt

ROOT = Path(__file__).parents[2]
MARK = "LGRPO_SOAK"
SLACK = {"memory_mib": 24.0, "files": 4.0, "threads": 4.0, "processes": 2.0}
"""Largest allowed increase from the third to the last quarter of a run."""


class FaultyReward(Reward):
    """The share of low digits; one in a thousand calls hangs, crashes, raises or exhausts memory."""

    def score(self, prompt: Prompt, completion: Completion) -> float:
        case = hash((prompt.position, completion.text)) % 4000
        if case == 0:
            time.sleep(1000)
        if case == 1:
            os._exit(3)
        if case == 2:
            raise RuntimeError("injected fault")
        if case == 3:
            bytearray(2**40)
        return sum(c in "01234" for c in completion.text) / 5


class FaultInjector(RolloutCallback):
    """Kill servers, reward workers or their fork server before some rollouts, and log the use of resources."""

    def __init__(self, path: str, seed: int = 0, servers_every: int = 250, workers_every: int = 40) -> None:
        self.path = Path(path)
        self.seed = seed
        self.servers_every = servers_every
        self.workers_every = workers_every

    def on_rollout_start(self, trainer: L.Trainer, pl_module: L.LightningModule, rollout: int) -> None:
        rng = random.Random(f"{self.seed} {rollout}")
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        if rollout % self.servers_every == self.servers_every - 1:
            for server in data.engine.group.servers if isinstance(data.engine, VLLMServerEngine) else []:
                os.killpg(server.process.pid, rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP]))
        pool = data._scorers[""].reward._pool
        if pool is not None and rollout % self.workers_every == self.workers_every - 1:
            for worker in list(pool.workers):
                os.kill(worker.pid, signal.SIGKILL)
            if rng.random() < 0.3:
                pool.fork_server.process.kill()
        if rollout % 10 == 0:
            with self.path.open("a") as file:
                file.write(json.dumps({"rollout": rollout, "attempt": os.getpid()} | resources()) + "\n")


def resources() -> dict[str, float]:
    """Return memory, open files, threads and processes of this run."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "memory_mib": int(status["VmRSS"].split()[0]) / 1024,
        "files": len(os.listdir("/proc/self/fd")),
        "threads": int(status["Threads"]),
        "processes": len(marked(os.environ.get(MARK, ""))),
    }


def marked(mark: str) -> list[int]:
    """Return the ids of processes, without zombies, that have the mark in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if mark and f"{MARK}={mark}".encode() in (path / "environ").read_bytes().split(b"\0"):
                found.append(int(path.name))
        except OSError:
            continue
    return found


def options(folder: Path, rollouts: int, arguments: argparse.Namespace) -> list[str]:
    return [
        f"--config={ROOT / 'configs' / 'demo.yaml'}",
        *(
            [
                f"--config={ROOT / 'configs' / 'vllm_server.yaml'}",
                "--data.engine.timeouts.hang=5",
                "--data.engine.timeouts.sync=30",
            ]
            if arguments.vllm
            else []
        ),
        f"--run={folder / 'run'}",
        f"--data.num_rollouts={rollouts}",
        "--trainer.max_epochs=1",
        "--trainer.limit_val_batches=0",
        "--trainer.num_sanity_val_steps=0",
        "--trainer.enable_progress_bar=false",
        "--trainer.log_every_n_steps=1",
        "--data.num_prompts=4",
        "--data.group_size=4",
        "--data.scoring.timeout=1",
        "--data.scoring.memory_gib=0.5",
        "--data.task.init_args.reward=tests.stress.soak.FaultyReward",
        "--checkpoint.every_n_train_steps=50",
        "--trainer.callbacks+=tests.stress.soak.FaultInjector",
        f"--trainer.callbacks.path={folder / 'resources.jsonl'}",
        f"--trainer.callbacks.servers_every={arguments.servers_every}",
    ]


def soak(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train with faults and signals, and return the resources of the last two quarters and the count of each fault."""
    rng, mark = random.Random(arguments.seed), secrets.token_hex(8)
    environment = {**os.environ, MARK: mark, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-m", "lgrpo.cli", "fit", *options(folder, arguments.rollouts, arguments)]
    stops = sorted(rng.sample(range(1, arguments.rollouts // 2), arguments.signals))
    attempts = 0
    while True:
        resume = ["--ckpt_path=last"] if attempts else []
        with (folder / "log").open("a") as log:
            process = subprocess.Popen([*command, *resume], env=environment, stdout=log, stderr=subprocess.STDOUT)
        attempts += 1
        if stops:
            stop = stops.pop(0)
            wait_until(lambda stop=stop, process=process: process.poll() is not None or reached(folder) >= stop)
            process.send_signal(rng.choice([signal.SIGTERM, signal.SIGINT]))
        code = process.wait()
        if code == 0:
            break
        assert code == RESUMABLE, f"the run ended with {code}:\n{(folder / 'log').read_text()[-3000:]}"
    wait_until(lambda: not marked(mark), seconds=30)
    assert not marked(mark), f"left running: {marked(mark)}"
    return check_resources(folder, arguments.rollouts) | {"attempts": attempts}


def check_resources(folder: Path, rollouts: int) -> dict[str, Any]:
    """Compare the last two quarters."""
    rows = [json.loads(line) for line in (folder / "resources.jsonl").read_text().splitlines()]
    assert rows[-1]["rollout"] >= rollouts - 10
    last = [row for row in rows if row["rollout"] >= rollouts // 2]
    assert len({row["attempt"] for row in last}) == 1
    half = len(last) // 2
    found: dict[str, Any] = {}
    for name, slack in SLACK.items():
        before, after = (statistics.median(row[name] for row in part) for part in (last[:half], last[half:]))
        found[name] = {"third quarter": round(before, 1), "last quarter": round(after, 1)}
        assert after <= before + slack, f"{name} grew: {found[name]}"
    series = read_series(folder / "run")
    for name in ("fault/engine_failures", "reward/failures", "reward/timeouts", "reward/crashes"):
        found[name] = sum(value for _, value in series.get(name, []))
    return found


def reached(folder: Path) -> int:
    try:
        return json.loads((folder / "resources.jsonl").read_text().splitlines()[-1])["rollout"]
    except (OSError, ValueError, IndexError):
        return -1


def wait_until(is_true: Callable[[], bool], seconds: float = 3600) -> None:
    deadline = time.monotonic() + seconds
    while not is_true() and time.monotonic() < deadline:
        time.sleep(0.2)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=2000)
    parser.add_argument("--signals", type=int, default=4, help="Number of signals sent in the first half.")
    parser.add_argument("--servers-every", type=int, default=250, help="Rollouts between two kills of the server.")
    parser.add_argument("--no-vllm", dest="vllm", action="store_false", help="Sample with the embedded engine.")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def main() -> None:
    arguments = parser().parse_args()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        found = soak(Path(folder), arguments)
    for name, value in found.items():
        print(f"{name:<24}{value}")
    print(f"{arguments.rollouts} rollouts in {time.perf_counter() - started:.0f} s: resources are flat")


if __name__ == "__main__":
    main()
