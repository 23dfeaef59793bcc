"""Compare the loop with its simulation: ``python -m tests.benchmarks.overlap``.

A real run (Trainer, data module, WeightSync, schedule, threads) of a very small model whose stages are extended to
known durations by sleeping. An engine that can overlap samples in the background, as servers do. The time from rollout
to rollout, over whole cycles after the first, is compared with a simulation of the same stages.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L

from lgrpo.engines import TransformersEngine
from lgrpo.engines.completions import Generation
from lgrpo.types import Completion
from tests.benchmarks.simulation import Loop, Schedule
from tests.helpers import fit

RESULTS = Path(__file__).parent / "results" / "overlap.json"
SECONDS = {"generate": 0.9, "update": 0.6, "sync": 0.4}
CASES = [  # v, lead, generate_ahead, can_overlap
    (1, 0, False, False),
    (4, 0, False, False),
    (4, 0, True, False),
    (1, 0, False, True),
    (2, 0, False, True),
    (4, 0, False, True),
    (4, 0, True, True),
    (1, 1, False, True),
    (1, 2, False, True),
    (2, 1, False, True),
    (4, 1, False, True),
    (4, 1, True, True),
]


def sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.perf_counter()))


class SlowEngine(TransformersEngine):
    """An engine whose rollouts and syncs take the durations of ``SECONDS``."""

    def __init__(self, num_prompts: int) -> None:
        super().__init__()
        self.num_prompts = num_prompts

    def receive_weights(self, weights: Any, step: int, version: int) -> Any:
        end = time.perf_counter() + SECONDS["sync"]
        try:
            return super().receive_weights(weights, step, version)
        finally:
            sleep_until(end)

    def sample(self, generation: Generation) -> None:
        start, keep = time.perf_counter(), generation.on_group

        def keep_later(index: int, group: list[Completion]) -> None:
            sleep_until(start + SECONDS["generate"] * (index + 1) / self.num_prompts)
            if keep is not None:
                keep(index, group)

        super().sample(replace(generation, on_group=keep_later))


class SlowUpdate(L.Callback):
    """Extends updates to the duration of ``SECONDS`` and records the end of each."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.started = 0.0

    def on_train_batch_start(self, *arguments: Any) -> None:
        self.started = time.perf_counter()

    def on_train_batch_end(self, *arguments: Any) -> None:
        sleep_until(self.started + SECONDS["update"])
        self.ends.append(time.perf_counter())


def window(period: int, lead: int) -> tuple[int, int, int]:
    """Return the first and the last rollout to evaluate, and the total number of rollouts."""
    first = -(-(lead + 1) // period) * period
    last = first + max(4, period)
    return first, last, last + lead + period


def measure(period: int, lead: int, generate_ahead: bool, can_overlap: bool) -> float:
    first, last, count = window(period, lead)
    slow = SlowUpdate()
    data = {"engine": SlowEngine(4), "lead": lead, "generate_ahead": generate_ahead, "overlap": can_overlap}
    fit(v=period, rollouts=count, data=data, callbacks=[slow])
    return (slow.ends[last - 1] - slow.ends[first - 1]) / (last - first)


def simulated(period: int, lead: int, generate_ahead: bool, can_overlap: bool, seconds: dict[str, float]) -> float:
    first, last, count = window(period, lead)
    schedule = Schedule(period=period, lead=lead, generate_ahead=generate_ahead, can_overlap=can_overlap)
    run = Loop(
        schedule,
        count,
        sync=seconds["sync"],
        overhead=0.0,
        generate=lambda rollouts: (seconds["generate"] * len(rollouts),) * 2,
        update=lambda rollout: (seconds["update"],) * 2,
    ).run()
    ends = [span.end for span in run.of("update")]
    return (ends[last - 1] - ends[first - 1]) / (last - first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    fit(rollouts=1)  # imports and first calls
    cases = []
    for case in CASES:
        cases.append({"case": case, "step_seconds": measure(*case)})
        expected = simulated(*case, SECONDS)
        print(f"{case}: measured {cases[-1]['step_seconds']:.3f} s, simulated {expected:.3f} s", flush=True)
    options.out.write_text(json.dumps({"seconds": SECONDS, "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
