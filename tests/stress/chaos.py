"""Kill runs repeatedly, with SIGKILL at random moments of every stage, and compare them with undisturbed runs.

``python -m tests.stress.chaos`` (``make chaos``). Each trial draws its settings: sync period v, passes i,
micro-batches, epochs, lead, ``generate_ahead``, ``overlap`` and ``partial``. Its run is killed several times, from the
first epoch to the last, resumed each time with the same settings, and compared with a run of these settings that was
not killed.

Each attempt is a separate process, forked from one that has finished its imports.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import select
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import lightning as L
import torch

import lgrpo.commands.fit  # noqa: F401  # before the forks, so that none imports it again
from lgrpo.cli import main as run_lgrpo
from lgrpo.hooks import RolloutCallback, Stage
from lgrpo.recordings import Recording
from lgrpo.report import read_series

ROOT = Path(__file__).parents[2]
MARK = "LGRPO_CHAOS"
LIMIT = 600  # seconds for an attempt

Engine = Literal["embedded", "pool", "server", "vllm", "vllm_pool"]
MOMENTS = ("sync", "generate", "score", "update", "checkpoint", "validate")
KILLS: dict[Engine, tuple[int, int]] = {
    "embedded": (20, 5),
    "pool": (8, 4),
    "server": (4, 4),
    "vllm": (4, 4),
    "vllm_pool": (4, 4),
}
"""Default number of kills of each engine, and how many of them are in one trial."""
ENGINES: dict[Engine, list[str]] = {
    "embedded": [],
    "pool": ["--data.engine=lgrpo.engines.EnginePool", "--data.engine.engine=lgrpo.engines.TransformersEngine"],
    "server": ["--data.engine=lgrpo.engines.VLLMServerEngine"],
    "vllm": ["--data.engine=lgrpo.engines.VLLMEngine"],
    "vllm_pool": ["--data.engine=lgrpo.engines.EnginePool", "--data.engine.engine=lgrpo.engines.VLLMEngine"],
}
ROUNDED = ("server", "vllm", "vllm_pool")
"""Engines whose log-probabilities are the same in another process except for rounding."""


@dataclass(kw_only=True, frozen=True)
class Trial:
    """Settings of a run."""

    engine: Engine
    period: int | None
    reuse: int
    micro_batches: int
    epochs: int
    rollouts: int
    """Rollouts in an epoch."""
    lead: int
    generate_ahead: bool
    overlap: bool
    partial: bool

    @classmethod
    def draw(cls, engine: Engine, rng: random.Random) -> Trial:
        return cls(
            engine=engine,
            period=rng.choice([1, 2, 3, 4, 7, None]),
            reuse=rng.choice([1, 2, 3]),
            micro_batches=rng.choice([1, 2, 3]),
            epochs=rng.choice([2, 3, 4]),
            rollouts=rng.choice([3, 4, 5]),
            lead=rng.choice([0, 0, 1, 2]),
            generate_ahead=rng.choice([False, True]),
            overlap=engine != "vllm" and rng.choice([False, True]),
            partial=engine == "embedded" and rng.choice([False, True]),  # a pool's choice of groups depends on time
        )

    @property
    def num_steps(self) -> int:
        return self.epochs * self.rollouts * self.reuse

    def options(self, run: Path) -> list[str]:
        """Return arguments of ``lgrpo fit``: a small run with a checkpoint after each step and all its records."""
        callbacks = {"SupervisedWarmStart": {"num_steps": 26}, "RolloutLog": {"every": 1, "num_groups": 4}}
        own = [{"class_path": f"lgrpo.callbacks.{name}", "init_args": given} for name, given in callbacks.items()]
        return [
            f"--config={ROOT / 'configs' / 'tiny.yaml'}",
            f"--run={run}",
            *ENGINES[self.engine],
            f"--data.num_rollouts={self.rollouts}",
            f"--trainer.max_epochs={self.epochs}",
            f"--data.reuse={self.reuse}",
            f"--data.lead={self.lead}",
            f"--data.generate_ahead={str(self.generate_ahead).lower()}",
            f"--data.overlap={str(self.overlap).lower()}",
            f"--data.partial={str(self.partial).lower()}",
            f"--weight_sync.period={'null' if self.period is None else self.period}",
            f"--trainer.accumulate_grad_batches={self.micro_batches}",
            "--reference_refresh.period=3",
            "--reference_refresh.decay=0.5",
            "--validate_every=lgrpo.ValidateEvery",
            "--validate_every.rollouts=2",
            "--data.evaluation.num_problems=8",
            "--data.evaluation.num_samples=2",
            "--data.num_prompts=4",
            "--data.group_size=4",
            "--checkpoint.every_n_train_steps=1",
            f"--trainer.callbacks={json.dumps(own)}",
            "--trainer.callbacks+=lgrpo.recordings.RolloutRecorder",
            "--trainer.logger=lgrpo.run.metrics_logger.MetricsLogger",
            f"--trainer.logger.save_dir={run}",
            "--trainer.logger.name=metrics",
            "--trainer.enable_progress_bar=false",
        ]


class StageReporter(RolloutCallback):
    """Write each stage with its epoch and step to a pipe, so that the parent process can kill the run in it."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def report(self, trainer: L.Trainer, stage: str) -> None:
        os.write(self.descriptor, f"{stage} {trainer.current_epoch} {trainer.global_step}\n".encode())

    def on_stage(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: Stage) -> None:
        self.report(trainer, stage)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self.report(trainer, "checkpoint")

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.report(trainer, "validate")


@dataclass(kw_only=True, frozen=True)
class Kill:
    """When to kill a run: some time after a stage begins, the first time at or after an optimizer step."""

    moment: str
    step: int
    delay: float


Killed: TypeAlias = tuple[str, int]
"""Moment and epoch in which a run was killed."""


def attempt(arguments: list[str], log: Path, kill: Kill | None) -> Killed | None:
    """Run ``lgrpo fit`` in a fork; return when it was killed, or None if it finished."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _run(arguments, log, writer)
    os.close(writer)
    killed, deadline, rest = None, time.monotonic() + LIMIT, ""
    with os.fdopen(reader, "rb", buffering=0) as file:
        while killed is None and select.select([file], [], [], max(0.0, deadline - time.monotonic()))[0]:
            received = file.read(4096)
            if not received:
                break
            *lines, rest = (rest + received.decode()).split("\n")
            for stage, epoch, step in (line.split() for line in lines):
                if kill is not None and killed is None and stage == kill.moment and int(step) >= kill.step:
                    time.sleep(kill.delay)
                    killed = stage, int(epoch)
        else:
            if killed is None:
                os.kill(pid, signal.SIGKILL)
                raise AssertionError(f"an attempt did not end within {LIMIT} s:\n{log.read_text()[-3000:]}")
        if killed is not None:
            os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) != 0:
        raise AssertionError(f"an attempt ended with {os.WEXITSTATUS(status)}:\n{log.read_text()[-3000:]}")
    check_nothing_runs()
    return killed if os.WIFSIGNALED(status) else None


def _run(arguments: list[str], log: Path, writer: int) -> None:
    """Run ``lgrpo fit`` with its output in a file, and end the process."""
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    code = 1
    try:
        reporter = ["--trainer.callbacks+=tests.stress.chaos.StageReporter", f"--trainer.callbacks.descriptor={writer}"]
        run_lgrpo(["fit", *arguments, *reporter])
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
        print(error)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)


def check_nothing_runs(seconds: float = 30) -> None:
    """Raise an error if a process that an attempt started, such as a server, still runs after some time."""
    deadline = time.monotonic() + seconds
    while left := marked(os.environ[MARK]):
        assert time.monotonic() < deadline, f"left running: {left}"
        time.sleep(0.1)


def marked(mark: str) -> list[int]:
    """Return the ids of processes, without zombies, that were started with the mark in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (path / "environ").read_bytes().split(b"\0"):
                found.append(int(path.name))
        except OSError:
            continue
    return found


def run_trial(trial: Trial, folder: Path, moments: Sequence[str], rng: random.Random) -> tuple[list[Killed], float]:
    """Train with and without kills and compare the results.

    Returns:
        The moment and the epoch of every kill, and the largest difference of a weight.
    """
    folder.mkdir(parents=True)
    straight, broken = folder / "straight", folder / "broken"
    attempt(trial.options(straight), folder / "straight.log", None)
    delays = [0.0, 0.002, 0.01, 0.04] + [0.2] * (trial.engine != "embedded")
    killed: list[Killed] = []
    for count, moment in enumerate(moments):
        last = trial.num_steps - 2 * trial.reuse  # every moment occurs after it
        kill = Kill(moment=moment, step=int((count + rng.random()) / len(moments) * last), delay=rng.choice(delays))
        can_resume = any((broken / "checkpoints").glob("*.ckpt"))
        if not can_resume and broken.exists():  # killed before the first checkpoint: start again
            broken.rename(folder / f"too-early-{count}")
        resume = ["--ckpt_path=last"] if can_resume else []
        found = attempt([*trial.options(broken), *resume], folder / "broken.log", kill)
        if found is None:
            break  # the run finished
        killed.append(found)
    attempt([*trial.options(broken), "--ckpt_path=last"], folder / "broken.log", None)
    return killed, compare(straight, broken, trial)


def compare(straight: Path, broken: Path, trial: Trial) -> float:
    """Check that counters, weights, optimizer, metrics, syncs and completions are those of the straight run.

    Returns:
        The largest difference of a weight; 0 unless the engine is one of ``ROUNDED``.
    """
    is_exact = trial.engine not in ROUNDED
    ends = [torch.load(run / "checkpoints" / "last.ckpt", weights_only=True) for run in (straight, broken)]
    for end, last_epochs in zip(ends, ((trial.epochs - 1,), (trial.epochs - 1, trial.epochs)), strict=True):
        assert end["global_step"] == trial.num_steps, f"{end['global_step']} steps instead of {trial.num_steps}"
        # a resume of a run that was killed after its last checkpoint writes it again, when the last epoch has ended
        assert end["epoch"] in last_epochs, f"the epoch is {end['epoch']} instead of {last_epochs[0]}"
    weights = [end["state_dict"] for end in ends]
    difference = max(float((tensor - weights[1][name]).abs().max()) for name, tensor in weights[0].items())
    assert difference == 0 if is_exact else difference < 1e-3, f"the weights differ by {difference}"
    states = [end["optimizer_states"][0]["state"] for end in ends]
    for index, values in states[0].items():
        for name, tensor in values.items():
            assert not is_exact or torch.equal(tensor, states[1][index][name]), (index, name)
    expected, got = read_series(straight), read_series(broken)
    assert expected.keys() == got.keys()
    for name in (name for name in expected if not name.startswith(("time/", "memory/"))):
        assert [step for step, _ in expected[name]] == [step for step, _ in got[name]], name
        assert not is_exact or expected[name] == got[name], name
    ignored = {"seconds"} if is_exact else {"seconds", "checksum"}
    for name in ("syncs.jsonl", "completions.jsonl"):
        rows = []
        for run in (straight, broken):
            lines = (run / name).read_text(encoding="utf-8").splitlines()
            rows.append([{k: v for k, v in json.loads(line).items() if k not in ignored} for line in lines])
        assert rows[0] == rows[1], name
    tables = [Recording.read(str(run / "rollouts")).table for run in (straight, broken)]
    for name in set(tables[0].column_names) - (set() if is_exact else {"logprobs"}):
        assert tables[0][name].to_pylist() == tables[1][name].to_pylist(), f"{name} of the recorded completions"
    assert tables[0]["rollout"].to_pylist() == [k for k in range(trial.epochs * trial.rollouts) for _ in range(16)]
    return difference


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--engine", nargs="+", choices=get_args(Engine), default=["embedded", "pool", "server"], help="Engines to kill."
    )
    add("--kills", type=int, help="Number of kills of each engine (by default 20 embedded, 8 pool, 4 server).")
    add("--per-trial", type=int, help="Number of kills of each run (by default 5 or 4).")
    add("--seed", type=int, default=0, help="Seed of settings and moments.")
    add("--keep", help="Folder for the runs; by default a temporary one.")
    arguments = parser.parse_args()
    os.environ[MARK] = secrets.token_hex(8)
    for engine in arguments.engine:
        with tempfile.TemporaryDirectory() as folder:
            report(engine, Path(arguments.keep or folder), arguments)


def report(engine: Engine, folder: Path, arguments: argparse.Namespace) -> None:
    """Run the trials of an engine and print what was killed."""
    start, rng = time.perf_counter(), random.Random(f"{arguments.seed} {engine}")
    wanted, per_trial = arguments.kills or KILLS[engine][0], arguments.per_trial or KILLS[engine][1]
    moments = cycle(rng.sample(MOMENTS, len(MOMENTS)))
    killed: list[Killed] = []
    largest = 0.0
    for number, first in enumerate(range(0, wanted, per_trial)):
        trial = Trial.draw(engine, rng)
        print(trial, flush=True)
        occurring = (moment for moment in moments if moment != "score" or not trial.overlap)  # scored in the background
        own = list(islice(occurring, min(per_trial, wanted - first)))
        found = run_trial(trial, folder / f"{engine}-{number}", own, rng)
        killed, largest = killed + found[0], max(largest, found[1])
    by_moment, by_epoch = Counter(moment for moment, _ in killed), Counter(epoch for _, epoch in killed)
    result = "identical results" if engine not in ROUNDED else f"identical samples, weights within {largest:.1g}"
    print(
        f"{engine}: killed {len(killed)} times ({dict(by_moment)}; by epoch {dict(sorted(by_epoch.items()))}), in "
        f"{time.perf_counter() - start:.0f} s: {result}",
        flush=True,
    )


if __name__ == "__main__":
    main()
