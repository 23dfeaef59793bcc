"""Time of each stage of a step, measured in the same way for both systems."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
STAGES = ("generate", "score", "sync", "update", "rest")


def bare_trainer(cuda: bool, micro_batches: int, callbacks: list[Any], strategy: Any = "auto") -> Any:
    """Return a Trainer for one epoch on one device that validates, logs, saves and prints nothing."""
    import lightning as L  # not in TRL's process

    return L.Trainer(
        accelerator="gpu" if cuda else "cpu",
        devices=1,
        strategy=strategy,
        precision="bf16-mixed" if cuda else "32-true",
        max_epochs=1,
        accumulate_grad_batches=micro_batches,
        gradient_clip_val=1.0,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tempfile.mkdtemp(),
        callbacks=callbacks,
    )


class Stages:
    """Time by stage of every step. Stages nest: time within an inner stage counts for that stage only.

    ``arithmetic`` is the computation of model and optimizer in an update, ``overhead`` the rest of the update, ``turn``
    the part of generation that wakes the engine, puts it to sleep and frees memory, and ``rest`` all time outside of
    stages. ``phases`` has the phase of each step; None for a warm-up step.
    """

    def __init__(self, phases: Sequence[int | None], clock: str) -> None:
        self.phases = [*phases, None]
        self.now = CLOCKS[clock]
        self.steps: dict[int, list[dict[str, float]]] = defaultdict(list)
        self.peaks: dict[int, int] = {}
        self.on_phase_end: Callable[[], None] = lambda: None
        self._totals: dict[str, float] = defaultdict(float)
        self._stack = ["rest"]
        self._last = self.now()
        self._thread = threading.get_ident()

    def wrap(self, owner: Any, name: str, stage: str, outside: str | None = None) -> None:
        """Count a method's time for a stage, unless the stage ``outside`` is active and keeps it."""
        original = getattr(owner, name)

        def timed(*arguments: Any, **options: Any) -> Any:
            if threading.get_ident() != self._thread or outside in self._stack:
                return original(*arguments, **options)
            return self.inside(stage, original, *arguments, **options)

        setattr(owner, name, timed)

    def wrap_optimizer(self, optimizer: Any) -> None:
        """Count an optimizer's step as arithmetic, without the closure that Lightning runs inside it."""
        original = optimizer.step

        def step(closure: Callable[[], Any] | None = None) -> Any:
            inner = None if closure is None else lambda: self.inside("overhead", closure)
            return self.inside("arithmetic", original, inner)

        optimizer.step = step

    def inside(self, stage: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call a function and count its time for a stage."""
        self._enter(stage)
        try:
            return function(*arguments, **options)
        finally:
            self._stack.pop()
            self._count(stage)

    def end_step(self, step: int) -> None:
        """Record the end of an optimizer step, counted from 1."""
        self._count(self._stack[-1])
        phase, following = self.phases[step - 1], self.phases[step]
        if phase is not None:
            self.steps[phase].append(dict(self._totals))
            self.peaks[phase] = peak_memory()
            self._last = self.now()  # reading the memory is not part of a step
        self._totals.clear()
        if following != phase:
            if phase is not None:
                self.on_phase_end()
            reset_peak_memory()
            self._last = self.now()  # a phase without warm-up is measured from its first step

    def summary(
        self, phase: int, tokens: Sequence[tuple[int, int, int]], v: int, parameters: int, peak_flops: float
    ) -> dict[str, Any]:
        """Return the median cycle of a phase: seconds per step, tokens per second, the update's share of the peak.

        ``tokens`` has the numbers of sampled, trained and read tokens of each step (a shared prompt is trained on with
        each of its completions, and read once), and a cycle ``v`` steps. The median is that of the seconds per trained
        token; ``steps`` and ``per_token`` have all of them, ``peak_gib`` the peak memory over all.
        """
        steps = self.steps[phase]
        seconds = [sum(step.values()) for step in steps]
        starts = range(0, len(steps), v)
        trained = [sum(trained for _, trained, _ in tokens[start : start + v]) for start in starts]
        per_token = [sum(seconds[start : start + v]) / count for start, count in zip(starts, trained, strict=True)]
        start = starts[per_token.index(statistics.median_low(per_token))]
        cycle = steps[start : start + v]
        sampled, count, read = (sum(each) / v for each in zip(*tokens[start : start + v], strict=True))
        names = {name for step in cycle for name in step}
        mean = defaultdict(float, {n: sum(s.get(n, 0.0) for s in cycle) / v for n in names})
        arithmetic, overhead = mean.pop("arithmetic", 0.0), mean.pop("overhead", 0.0)
        mean["update"] = arithmetic + overhead
        mean["generate"] += (turn := mean.pop("turn", 0.0))
        whole = sum(mean.values())
        speeds = {"generate": sampled, "score": sampled, "update": count}
        return {
            "step_seconds": whole,
            "steps": [round(each, 4) for each in seconds],
            "per_token": per_token,
            "stages": {name: mean[name] for name in STAGES},
            "tokens_per_second": {n: speed / mean[n] for n, speed in speeds.items() if mean[n]},
            "arithmetic_seconds": arithmetic,
            "turn_seconds": turn,
            "own_seconds": overhead + mean["rest"],
            "own_share": (overhead + mean["rest"]) / whole,
            "update_mfu": 6 * parameters * read / mean["update"] / peak_flops,
            "sampled_tokens": sampled,
            "trained_tokens": count,
            "read_tokens": read,
            "peak_gib": self.peaks[phase] / 2**30,
        }

    def _enter(self, stage: str) -> None:
        self._count(self._stack[-1])
        self._stack.append(stage)

    def _count(self, stage: str) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = self.now()
        self._totals[stage] += now - self._last
        self._last = now


class UsedMemory(threading.Thread):
    """Records the peak of the memory in use: on the GPU by all processes, on a CPU by this process and its children."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.period, self.peak = (0.05 if torch.cuda.is_available() else 0.5), 0
        self._ended = threading.Event()
        atexit.register(self.end)

    def run(self) -> None:
        while not self._ended.wait(self.period):
            self.peak = max(self.peak, used_memory())

    def end(self) -> None:
        """Stop the thread; a process that exits while it queries the GPU would be aborted."""
        self._ended.set()
        self.join()


_used: list[UsedMemory] = []


def used_memory() -> int:
    """Return the bytes in use: on the GPU by all processes, on a CPU by this process and its children.

    Pages that several processes share count once (proportional set size); imports count.
    """
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return total - free
    if Path("/proc/self/smaps_rollup").exists():
        return sum(map(_proportional_size, _process_tree(os.getpid())))
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    whose = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(resource.getrusage(each).ru_maxrss for each in whose) * unit


def _process_tree(pid: int) -> Iterator[int]:
    yield pid
    with contextlib.suppress(OSError):  # the process has ended
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in (thread / "children").read_text().split():
                yield from _process_tree(int(child))


def _proportional_size(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def reset_peak_memory() -> None:
    """Start a new measurement of the peak."""
    if not _used:
        _used.append(UsedMemory())
        _used[0].start()
    _used[0].peak = 0
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def peak_memory() -> int:
    """Return the peak of :func:`used_memory` since the last reset, in bytes."""
    return max(used_memory(), _used[0].peak if _used else 0)


def memory_before() -> int:
    """Return the bytes of GPU memory in use before a run, without creating a CUDA context; 0 if unknown or on a CPU."""
    if not torch.cuda.is_available() or shutil.which("nvidia-smi") is None:
        return 0
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]) * 2**20


def matmul_peak(clock: str = "wall", size: int = 1536, repeats: int = 8) -> float:
    """Return the FLOP/s of a large float32 matrix product on this machine, the best of several."""
    now = CLOCKS[clock]
    a, b = torch.randn(size, size), torch.randn(size, size)
    best = float("inf")
    for _ in range(repeats):
        start = now()
        a @ b
        best = min(best, now() - start)
    return 2 * size**3 / best
