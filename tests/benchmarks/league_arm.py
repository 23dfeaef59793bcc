"""The task and a run of the league: data, the start model of a seed, and one arm.

The task is to sort five to eight digits between 0 and 4: ``43013>`` has the answer ``01334``. Problems
of each length are equally frequent, and longer ones are harder. Training, validation and test problems are disjoint.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BASE = Path(__file__).parent / "league.yaml"
LENGTHS, DIGITS = range(5, 9), "01234"
SIZES = {"validation": 256, "test": 512, "train": 2_048}
"""Number of problems in each set, equally many of each length."""
START = 0.3
"""pass@1 on validation problems that ends the supervised phase before the start."""
PERIODS = {"1": 1, "8": 8, "64": 64, "offline": None}
"""v, the rollouts between two syncs, by the name of a lag."""


@dataclass(frozen=True, order=True)
class Job:
    """One run: a method at a lag with a learning rate and a seed, to select the rate or to test it."""

    stage: str
    """``select`` or ``test``."""
    method: str
    lag: str
    lr: float
    seed: int


def methods() -> list[str]:
    """Return the names of all named methods."""
    return sorted(path.stem for path in (ROOT / "configs" / "algorithms").glob("*.yaml"))


def problems() -> dict[str, list[dict[str, str]]]:
    """Return the rows of each set; no question is in two of them."""
    rng, seen = random.Random(0), set[str]()
    sets: dict[str, list[dict[str, str]]] = {}
    for name, size in SIZES.items():
        rows: list[dict[str, str]] = []
        while len(rows) < size:
            length = LENGTHS[len(rows) % len(LENGTHS)]
            question = "".join(rng.choice(DIGITS) for _ in range(length))
            if question not in seen:
                seen.add(question)
                answer = "".join(sorted(question))
                rows.append({"question": question, "answer": answer, "solution": answer})
        sets[name] = rows
    return sets


def write_data(folder: Path) -> None:
    """Write ``train.jsonl``, ``validation.jsonl`` and ``test.jsonl`` unless they exist."""
    if not (folder / "train.jsonl").exists():
        folder.mkdir(parents=True, exist_ok=True)
        for name, rows in problems().items():  # the training set is the last one
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def start_folder(cache: Path, seed: int) -> Path:
    """Return the folder of the start model of a seed; its name changes with the base config and the data."""
    settings = BASE.read_text() + repr((LENGTHS, DIGITS, SIZES, START))
    return cache / f"start-{hashlib.sha256(settings.encode()).hexdigest()[:8]}-{seed}"


def make_start(cache: Path, seed: int) -> Path:
    """Train the start model of a seed on solutions, unless it exists, and return its folder."""
    folder = start_folder(cache, seed)
    if not folder.exists():
        settings = ["--trainer.callbacks+=tests.benchmarks.league_start.SupervisedStart"]
        settings += [f"--trainer.callbacks.target={START}", "--trainer.max_epochs=0"]
        settings += ["--trainer.num_sanity_val_steps=-1", f"--seed_everything={seed}"]
        with fitted(cache, settings) as (cli, run):
            made = Path(tempfile.mkdtemp(dir=cache))
            cli.model.policy.model.save_pretrained(made)
            checksum = hashlib.sha256((made / "model.safetensors").read_bytes()).hexdigest()[:12]
            (made / "scores.json").write_text(json.dumps(scores(run) | {"checksum": checksum}))
        try:
            made.rename(folder)
        except OSError:  # another run was first
            shutil.rmtree(made)
    return folder


@contextlib.contextmanager
def fitted(cache: Path, arguments: list[str]) -> Iterator[tuple[Any, Path]]:
    """Run ``lgrpo fit`` on the task in this process, and yield the finished CLI and the folder of the run."""
    import torch

    from lgrpo.cli import quiet_lightning
    from lgrpo.commands.fit import LGRPOCLI

    torch.set_num_threads(1)
    quiet_lightning()
    write_data(cache / "data")
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(cache / "data"):  # the config names the files
        with open(os.devnull, "w") as null, contextlib.redirect_stdout(null):
            cli = LGRPOCLI(["fit", f"--config={BASE}", *arguments, "--log=csv", f"--run={folder}/run"])
        yield cli, Path(folder) / "run"


def scores(run: Path) -> dict[str, float]:
    """Return the last pass@1 of a run on validation and test problems."""
    from lgrpo.report import read_series

    series = read_series(run)
    names = {"validation": "val/pass@1", "test": "val/test/pass@1"}
    return {key: round(series[name][-1][1], 4) for key, name in names.items()}


def arguments_of(job: Job, start: Path) -> list[str]:
    """Return the arguments of ``lgrpo fit`` for a job."""
    period = PERIODS[job.lag]
    return [
        "--model.policy.config=null",
        f"--model.policy.name={start}",
        f"--config={ROOT / 'configs' / 'algorithms' / job.method}.yaml",
        f"--weight_sync.period={'null' if period is None else period}",
        f"--model.optimizer.init_args.lr={job.lr}",
        f"--seed_everything={job.seed}",
    ]


def run(job: Job, cache: Path, extra: tuple[str, ...] = ()) -> dict[str, Any]:
    """Run a job in this process and return its row, without the commit."""
    from lgrpo.report import read_series

    start = make_start(cache, job.seed)
    began, cpu = time.perf_counter(), time.process_time()
    with fitted(cache, [*arguments_of(job, start), *extra]) as (cli, folder):
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
        drift = [value for _, value in read_series(folder).get("train/kl_behaviour", [])]  # none if all was masked
        row = asdict(job) | {
            "start": json.loads((start / "scores.json").read_text()),
            **scores(folder),
            "test_by_length": by_length(folder),
            "kl_behaviour_max": round(max(drift), 4) if drift else None,
            "steps": cli.trainer.global_step,
            "seconds": round(seconds, 1),
            "cpu_seconds": round(cpu_seconds, 1),
        }
    return row


def by_length(run: Path) -> dict[str, float]:
    """Return pass@1 on the test problems of each length."""
    (path,) = (run / "evaluations").glob("test-step=*.jsonl")
    found: dict[str, list[float]] = {str(length): [] for length in LENGTHS}
    for line in path.read_text().splitlines():
        problem = json.loads(line)
        found[str(len(problem["row"]["question"]))].append(statistics.fmean(problem["correct"]))
    return {length: round(statistics.fmean(values), 4) for length, values in found.items()}


def attempt(job: Job, cache: Path, shared: dict[str, Any]) -> dict[str, Any]:
    """Run a job and return its row; one with ``error`` if it failed."""
    try:
        return run(job, cache) | shared
    except (Exception, SystemExit) as error:
        return asdict(job) | {"error": f"{type(error).__name__}: {error}"[:300]} | shared


@cache
def origin() -> dict[str, Any]:
    """Return the commit, marked if the code has changes, and the versions of packages."""
    from tests.benchmarks.step import commit

    versions = {package: importlib.metadata.version(package) for package in ("torch", "lightning", "transformers")}
    return {"commit": commit(), "versions": versions}
