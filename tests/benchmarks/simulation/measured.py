"""The seconds of each stage on one GPU, read from a benchmark's file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class SimulationError(ValueError):
    """An input that cannot be simulated."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One rollout at v = 1 on one GPU that engine and trainer share; all completions have the same length."""

    num_prompts: int
    group_size: int
    prompt_tokens: int
    completion_tokens: float
    micro_batches: int
    generate: float
    """Seconds, as the following stages."""
    score: float
    sync: float
    update: float
    rest: float
    """Remaining seconds of a step: waking the engine, putting it to sleep, the loop's overhead."""
    model_bytes: float | None = None
    decode_steps: tuple[tuple[int, float], ...] = ()
    """(completions decoded together, seconds of a decode step) pairs."""

    @property
    def num_completions(self) -> int:
        return self.num_prompts * self.group_size

    @property
    def update_seconds_per_token(self) -> float:
        return self.update / (self.num_completions * (self.prompt_tokens + self.completion_tokens))


def read_measured(path: Path) -> Measured:
    """Read a file of ``tests.benchmarks.step`` or ``tests.benchmarks.vllm_stages``."""
    try:
        text = path.read_text(encoding="utf-8")
        rows = path.suffix == ".jsonl"
        content = {"runs": [json.loads(line) for line in text.splitlines()]} if rows else json.loads(text)
    except OSError as error:
        raise SimulationError(f"the measured times {path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise SimulationError(f"the measured times {path} are not JSON: {error}") from error
    try:
        found = _from_stages(content) if "settings" in content else _from_step(content)
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise SimulationError(
            f"{path} lacks {error}: it must be a file of python -m tests.benchmarks.step or vllm_stages"
        ) from error
    if not found:
        raise SimulationError(f"{path} has no run at v = 1 with completions of one length")
    base = found[0]
    if bad := [n for n in ("generate", "update", "completion_tokens") if not getattr(base, n) > 0]:
        raise SimulationError(f"{path}: {bad[0]} is {getattr(base, bad[0])}; it must be above 0")
    if bad := [n for n in ("score", "sync", "rest") if not getattr(base, n) >= 0]:
        raise SimulationError(f"{path}: {bad[0]} is {getattr(base, bad[0])} s; it cannot be negative")
    decode_steps = {run.num_completions: run.generate / run.completion_tokens for run in reversed(found)}
    return Measured(**vars(base) | {"decode_steps": tuple(sorted(decode_steps.items()))})


def _from_step(content: dict[str, Any]) -> list[Measured]:
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


def _from_stages(content: dict[str, Any]) -> list[Measured]:
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
