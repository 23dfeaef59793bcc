"""The runs of a sweep: finished ones are skipped, interrupted ones resumed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lgrpo.run.atomic import replaced
from lgrpo.sweep.grid import Arm, Grid, SweepError
from lgrpo.sweep.workers import Runner, SeparateProcesses, SharedWorkers

State = Literal["finished", "resumed", "new"]


@dataclass(kw_only=True, frozen=True)
class SweepRun:
    """One arm with one seed."""

    arm: Arm
    seed: int
    folder: Path
    """Folder of the run, as ``lgrpo fit --run`` creates it."""

    @property
    def log(self) -> Path:
        """File with the output of the process."""
        return self.folder.with_name(f"{self.folder.name}.log")

    @property
    def state_file(self) -> Path:
        """JSON file with the arguments of the run, their fingerprint, and whether it finished."""
        return self.folder.with_name(f"{self.folder.name}.json")

    @property
    def arguments(self) -> list[str]:
        """Arguments of ``lgrpo fit``."""
        return [*self.arm.arguments, f"--seed_everything={self.seed}", f"--run={self.folder}"]

    @property
    def state(self) -> State:
        """Whether the run is finished, can be resumed from a checkpoint, or starts anew.

        Raises:
            SweepError: The folder has a run with other settings.
        """
        if not self.state_file.exists():
            return "new"
        saved = json.loads(self.state_file.read_text(encoding="utf-8"))
        if saved["fingerprint"] != self._fingerprint():
            raise SweepError(
                f"{self.folder} was run with other settings than the grid has now: choose another --out, or remove it"
            )
        if saved["finished"]:
            return "finished"
        return "resumed" if list(self.folder.glob("checkpoints/last*.ckpt")) else "new"

    def write_state(self, **state: Any) -> None:
        """Replace the state file."""
        state |= {"arm": self.arm.name, "seed": self.seed, "arguments": self.arguments}
        state["fingerprint"] = self._fingerprint()
        with replaced(self.state_file) as unfinished:
            unfinished.write_text(json.dumps(state, indent=1), encoding="utf-8")

    def _fingerprint(self) -> str:
        """Return a hash of the settings, the seed and the contents of the configs."""
        configs = [Path(path).read_text(encoding="utf-8") for path in self.arm.configs]
        everything = json.dumps([configs, self.arm.settings, self.seed])
        return hashlib.sha256(everything.encode()).hexdigest()[:16]


def list_runs(grid: Grid, out: Path) -> list[SweepRun]:
    """Return every run of a grid: all arms with the first seed, then all with the second, …"""
    return [
        SweepRun(arm=arm, seed=seed, folder=out / arm.folder / f"seed-{seed}")
        for seed in grid.seeds
        for arm in grid.arms
    ]


def run_all(
    runs: list[SweepRun], jobs: int, report: Callable[[str], None], share_engines: bool = False
) -> list[SweepRun]:
    """Run every run that is not finished, ``jobs`` at a time, and return the failed ones.

    ``report`` receives one line per run that ends. Ctrl-C is raised after every process has written its checkpoint.
    With ``share_engines`` one process does many runs, and keeps its engine between them.
    """
    states = {id(run): run.state for run in runs}  # raises before any run starts
    environment = dict(os.environ)
    environment.pop("LGRPO_RUN", None)
    if jobs > 1:
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // jobs)))
    runner: Runner = SharedWorkers(jobs, environment) if share_engines else SeparateProcesses(environment)
    failed: list[SweepRun] = []

    def run_one(number: int, run: SweepRun) -> None:
        label, state = f"[{number}/{len(runs)}] {run.arm.name}, seed {run.seed}", states[id(run)]
        if state == "finished":
            report(f"{label}: finished already")
            return
        if state == "new" and run.folder.exists():  # started, but without a checkpoint to resume from
            shutil.rmtree(run.folder)
        run.write_state(finished=False)
        resume = ["--ckpt_path=last"] if state == "resumed" else []
        start = time.perf_counter()
        status = runner.run([*run.arguments, *resume], run.log)
        seconds = time.perf_counter() - start
        if status is None:
            report(f"{label}: stopped")
        elif status == 0:
            run.write_state(finished=True, seconds=round(seconds, 1))
            report(f"{label}: {'resumed and ' if resume else ''}finished in {seconds:.0f} s")
        else:
            failed.append(run)
            report(f"{label}: FAILED with status {status}, see {run.log}; its last line: {last_line(run.log)}")

    runner.for_each(enumerate(runs, 1), lambda job: run_one(*job), jobs)
    return sorted(failed, key=runs.index)


def last_line(log: Path) -> str:
    """Return the last line of a log that is not blank."""
    with log.open(encoding="utf-8", errors="replace") as file:
        lines = deque((line.strip() for line in file if line.strip()), maxlen=1)
    return lines[0] if lines else "(no output)"
