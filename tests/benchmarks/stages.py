"""Time of each stage of a step, measured in the same way for both systems."""

from __future__ import annotations

import atexit
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
STAGES = ("generate", "score", "sync", "update", "rest")


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
        self._totals.clear()
        if following != phase:
            if phase is not None:
                self.on_phase_end()
            reset_peak_memory()
            self._last = self.now()  # a phase without warm-up is measured from its first step

    def summary(self, phase: int, sampled: float, trained: float, parameters: int, peak_flops: float) -> dict[str, Any]:
        """Return means over the steps of a phase: seconds, tokens per second, the update's share of the peak, memory.

        ``sampled`` is the number of generated tokens per step, ``trained`` of the tokens in an update.
        """
        steps = self.steps[phase]
        names = {name for step in steps for name in step}
        mean = defaultdict(float, {n: sum(s.get(n, 0.0) for s in steps) / len(steps) for n in names})
        arithmetic, overhead = mean.pop("arithmetic", 0.0), mean.pop("overhead", 0.0)
        mean["update"] = arithmetic + overhead
        mean["generate"] += (turn := mean.pop("turn", 0.0))
        whole = sum(mean.values())
        speeds = {"generate": sampled, "score": sampled, "update": trained}
        return {
            "step_seconds": whole,
            "steps": [round(sum(step.values()), 4) for step in steps],
            "stages": {name: mean[name] for name in STAGES},
            "tokens_per_second": {n: tokens / mean[n] for n, tokens in speeds.items() if mean[n]},
            "arithmetic_seconds": arithmetic,
            "turn_seconds": turn,
            "own_seconds": overhead + mean["rest"],
            "own_share": (overhead + mean["rest"]) / whole,
            "update_mfu": 6 * parameters * trained / mean["update"] / peak_flops,
            "sampled_tokens": sampled,
            "trained_tokens": trained,
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


class DeviceMemory(threading.Thread):
    """Records the peak of a GPU's used memory, over all processes and including caches."""

    def __init__(self, period: float = 0.05) -> None:
        super().__init__(daemon=True)
        self.period, self.peak = period, 0
        self._ended = threading.Event()
        atexit.register(self.end)

    def run(self) -> None:
        while not self._ended.wait(self.period):
            free, total = torch.cuda.mem_get_info()
            self.peak = max(self.peak, total - free)

    def end(self) -> None:
        """Stop the thread; a process that exits while it queries the GPU would be aborted."""
        self._ended.set()
        self.join()


_device: list[DeviceMemory] = []


def reset_peak_memory() -> None:
    """Start a new measurement of the peak."""
    if torch.cuda.is_available():
        if not _device:
            _device.append(DeviceMemory())
            _device[0].start()
        _device[0].peak = 0
        torch.cuda.reset_peak_memory_stats()
    elif (path := Path("/proc/self/clear_refs")).exists():
        path.write_text("5")


def peak_memory() -> int:
    """Return the peak in bytes: used on the GPU, or resident in this process (imports included)."""
    if torch.cuda.is_available():
        return _device[0].peak if _device else torch.cuda.max_memory_allocated()
    if (status := Path("/proc/self/status")).exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    import resource
    import sys

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


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
