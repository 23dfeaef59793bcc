"""What was measured on one GPU: the seconds of each stage, read from a benchmark's file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class SimulationError(ValueError):
    """An input no simulation can follow from."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One rollout at v = 1 on one GPU, engine and trainer taking turns; all completions equally long."""

    num_prompts: int
    group_size: int
    prompt_tokens: int
    completion_tokens: float
    micro_batches: int
    generate: float
    """Seconds, as those that follow."""
    score: float
    sync: float
    update: float
    rest: float
    """Whatever else a step took: the engine woken and put to sleep, the loop's own time."""
    model_bytes: float | None = None
    paces: tuple[tuple[int, float], ...] = ()
    """Completions decoded at a time, and the seconds of a decode step with so many."""

    @property
    def num_completions(self) -> int:
        return self.num_prompts * self.group_size

    @property
    def update_seconds_per_token(self) -> float:
        return self.update / (self.num_completions * (self.prompt_tokens + self.completion_tokens))


def read_measured(path: Path) -> Measured:
    """Reads what ``tests.benchmarks.step`` or ``tests.benchmarks.vllm_stages`` wrote."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SimulationError(f"the measured times {path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise SimulationError(f"the measured times {path} are not JSON: {error}") from error
    try:
        found = _of_stages(content) if "settings" in content else _of_step(content)
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise SimulationError(
            f"{path} lacks {error}: it is to be a file of python -m tests.benchmarks.step or vllm_stages"
        ) from error
    if not found:
        raise SimulationError(f"{path} has no run at v = 1 with completions of one length: there is nothing to scale")
    base = found[0]
    if bad := [n for n in ("generate", "update", "completion_tokens") if not getattr(base, n) > 0]:
        raise SimulationError(f"{path}: {bad[0]} is {getattr(base, bad[0])}; it must be more than 0")
    if bad := [n for n in ("score", "sync", "rest") if not getattr(base, n) >= 0]:
        raise SimulationError(f"{path}: {bad[0]} is {getattr(base, bad[0])} s; it cannot be negative")
    paces = {run.num_completions: run.generate / run.completion_tokens for run in reversed(found)}
    return Measured(**vars(base) | {"paces": tuple(sorted(paces.items()))})


def _of_step(content: dict[str, Any]) -> list[Measured]:
    found = []
    for run in content["runs"]:
        settings, ours = run["settings"], run.get("lgrpo", {})
        if settings["v"] != 1 or settings["workload"] != "fixed" or "stages" not in ours:
            continue
        parameters = ours.get("parameters")
        found.append(
            Measured(
                num_prompts=settings["prompts"],
                group_size=settings["group"],
                prompt_tokens=settings["prompt_tokens"],
                completion_tokens=ours.get("mean_length", settings["completion_tokens"]),
                micro_batches=settings["micro_batches"],
                **{stage: ours["stages"][stage] for stage in ("generate", "score", "sync", "update", "rest")},
                model_bytes=None if parameters is None else 2.0 * parameters,
            )
        )
    return found


def _of_stages(content: dict[str, Any]) -> list[Measured]:
    settings, found = content["settings"], []
    for run in content["runs"]:
        if run["v"] != 1:
            continue
        seconds = {name: run[f"{name}_seconds"] for name in ("generate", "score", "sync", "update")}
        sampled = run["generate_tokens_per_second"] * seconds["generate"]
        found.append(
            Measured(
                num_prompts=settings["prompts"],
                group_size=settings["group"],
                prompt_tokens=settings["prompt_tokens"],
                completion_tokens=sampled / (settings["prompts"] * settings["group"]),
                micro_batches=settings["micro_batches"],
                **seconds,
                rest=run["step_seconds"] - sum(seconds.values()),
            )
        )
    return found
