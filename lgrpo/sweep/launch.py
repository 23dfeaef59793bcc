"""Every run of a sweep a process of its own: skipped where it is finished, resumed where it can be."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lgrpo.sweep.grid import Arm, Grid, SweepError

State = Literal["finished", "resumed", "new"]


@dataclass(kw_only=True, frozen=True)
class Launch:
    """One arm with one seed, and where it lies."""

    arm: Arm
    seed: int
    folder: Path
    """Of the run, as ``lgrpo fit --run`` makes it."""

    @property
    def log(self) -> Path:
        """What the run printed."""
        return self.folder.with_name(f"{self.folder.name}.log")

    @property
    def note(self) -> Path:
        """What was run, and whether it came to its end."""
        return self.folder.with_name(f"{self.folder.name}.json")

    @property
    def arguments(self) -> list[str]:
        return [*self.arm.arguments, f"--seed_everything={self.seed}", f"--run={self.folder}"]

    @property
    def state(self) -> State:
        """What there is of it already.

        Raises:
            SweepError: there is a run with other settings.
        """
        if not self.note.exists():
            return "new"
        noted = json.loads(self.note.read_text(encoding="utf-8"))
        if noted["fingerprint"] != self._fingerprint():
            raise SweepError(
                f"{self.folder} was run with other settings than the grid has now: choose another --out, or remove it"
            )
        if noted["finished"]:
            return "finished"
        return "resumed" if list(self.folder.glob("checkpoints/last*.ckpt")) else "new"

    def write_note(self, **facts: Any) -> None:
        facts |= {"arm": self.arm.name, "seed": self.seed, "arguments": self.arguments}
        facts["fingerprint"] = self._fingerprint()
        self.note.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.note.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(facts, indent=1), encoding="utf-8")
        os.replace(unfinished, self.note)

    def _fingerprint(self) -> str:
        """Of the settings, the contents of the configs included."""
        configs = [Path(path).read_text(encoding="utf-8") for path in self.arm.configs]
        everything = json.dumps([configs, self.arm.settings, self.seed])
        return hashlib.sha256(everything.encode()).hexdigest()[:16]


def launches(grid: Grid, out: Path) -> list[Launch]:
    """Every run of a grid: all arms with the first seed, then all with the second, …"""
    return [
        Launch(arm=arm, seed=seed, folder=out / arm.folder / f"seed-{seed}") for seed in grid.seeds for arm in grid.arms
    ]


class _Processes:
    """Those that run, so that Ctrl-C reaches them: each then writes a checkpoint and ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self.stopped = False

    def run(self, command: list[str], log: Path, environment: dict[str, str]) -> int | None:
        """Its exit status; None where the sweep was stopped."""
        with log.open("ab") as file:
            with self._lock:
                if self.stopped:
                    return None
                process = subprocess.Popen(
                    command, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
                )
                self._running.add(process)
            status = process.wait()
            with self._lock:
                self._running.discard(process)
                return None if self.stopped else status

    def stop(self) -> None:
        with self._lock:
            self.stopped = True
            for process in self._running:
                process.send_signal(signal.SIGINT)


def launch(runs: list[Launch], jobs: int, say: Callable[[str], None]) -> list[Launch]:
    """Runs what is not finished, ``jobs`` at a time. Those that failed; each has its log.

    Raises:
        KeyboardInterrupt: after every running process has written its checkpoint.
    """
    states = {id(run): run.state for run in runs}  # before the first is touched
    environment = dict(os.environ)
    environment.pop("LGRPO_RUN", None)
    if jobs > 1:
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // jobs)))
    processes = _Processes()
    failed: list[Launch] = []

    def one(place: int, run: Launch) -> None:
        label, state = f"[{place}/{len(runs)}] {run.arm.name}, seed {run.seed}", states[id(run)]
        if state == "finished":
            say(f"{label}: finished already")
            return
        if state == "new" and run.folder.exists():  # begun without a checkpoint to go on from
            shutil.rmtree(run.folder)
        run.write_note(finished=False)
        go_on = ["--ckpt_path=last"] if state == "resumed" else []
        start = time.perf_counter()
        status = processes.run([sys.executable, "-m", "lgrpo.cli", "fit", *run.arguments, *go_on], run.log, environment)
        seconds = time.perf_counter() - start
        if status is None:
            say(f"{label}: stopped")
        elif status == 0:
            run.write_note(finished=True, seconds=round(seconds, 1))
            say(f"{label}: {'resumed and ' if go_on else ''}finished in {seconds:.0f} s")
        else:
            failed.append(run)
            say(f"{label}: FAILED with status {status}, {run.log} says why; its last line: {last_line(run.log)}")

    with ThreadPoolExecutor(jobs, thread_name_prefix="sweep") as threads:
        futures = [threads.submit(one, place, run) for place, run in enumerate(runs, 1)]
        try:
            for future in futures:
                future.result()
        except BaseException:
            processes.stop()
            raise
    return sorted(failed, key=runs.index)


def last_line(log: Path) -> str:
    """The last line of a log that says anything."""
    with log.open(encoding="utf-8", errors="replace") as file:
        lines = deque((line.strip() for line in file if line.strip()), maxlen=1)
    return lines[0] if lines else "(nothing)"
