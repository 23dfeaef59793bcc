"""Made-up run folders of any size."""

from __future__ import annotations

import csv
import json
import math
import random
from pathlib import Path
from typing import Any

import yaml


def settings(**changed: Any) -> dict[str, Any]:
    """Return a shortened configuration of a run; ``data__reuse=2`` changes one setting."""
    config: dict[str, Any] = {
        "seed_everything": 0,
        "trainer": {"max_epochs": 4, "max_steps": -1, "log_every_n_steps": 1},
        "model": {"policy": {"name": None, "config": {"model_type": "qwen2"}}},
        "data": {
            "task": {"class_path": "lgrpo.tasks.SortDigits", "init_args": {"num_digits": 3}},
            "num_prompts": 16,
            "group_size": 8,
            "reuse": 1,
            "num_rollouts": 25,
            "lead": 0,
            "evaluation": {"num_samples": 8},
        },
        "weight_sync": {"class_path": "lgrpo.WeightSync", "init_args": {"period": 10}},
    }
    for name, value in changed.items():
        *path, last = name.split("__")
        node = config
        for key in path:
            node = node[key]
        node[last] = value
    return config


def metrics(steps: int, period: int = 10, every: int = 25, seed: int = 0) -> list[dict[str, float]]:
    """Return rows as the module logs them: one for each step, and one for each validation."""
    draw = random.Random(seed)
    rows: list[dict[str, float]] = []
    for step in range(steps):
        grown = 1 - math.exp(-2 * step / steps)
        if step % every == 0:
            share = 0.3 + 0.6 * grown
            other = {"val/pass@8": min(1.0, share + 0.1), "val/pass@8_stderr": 0.03}
            rows.append({"step": step, "val/pass@1": share, "val/pass@1_stderr": 0.02, **other})
        lag = step % period
        rows.append(
            {
                "step": step,
                "rollout/reward": 0.2 + 0.6 * grown + draw.gauss(0, 0.05),
                "rollout/reward_stderr": 0.03,
                "rollout/zero_variance_fraction": 0.2,
                "train/lag": lag,
                "train/lag_max": lag,
                "train/ratio_mean": 1 + draw.gauss(0, 0.001 * (1 + lag)),
                "train/clip_fraction_low": 0.01 * lag * draw.random(),
                "train/clip_fraction_high": 0.01 * lag * draw.random(),
                "train/kl_behaviour": 0.001 * lag**2 * draw.random(),
                "train/kl_reference": 0.01 * grown,
                "train/loss": draw.gauss(0, 0.02),
                "time/sync": 0.5 if lag == 0 else 0.0,
                "time/generate": 3 + draw.random(),
                "time/score": 0.4,
                "time/wait": 3.5,
                "time/update": 2.0,
                "time/trainer_idle_share": 0.64,
                "time/engine_idle_share": 0.36,
                "monitor/gain": draw.gauss(0.01, 0.01),
                "monitor/gain_stderr": 0.01,
                "mine/colour": step % 7,
            }
        )
    return rows


def clocked(
    rows: list[dict[str, float]], overlaps: bool, period: int = 4, start: float = 5.0
) -> list[dict[str, float]]:
    """Return the rows with the times of a run whose cycles are sampled in one call: 2 s each, after a sync of 1 s.

    Each rollout is prepared for 0.5 s after it was sampled, and trained on for 2 s.
    """
    clocked, now, synced = [], start, start
    for row in (dict(row) for row in rows if "train/loss" in row):
        position = int(row["step"]) % period
        if position == 0:
            synced = now + 1.0
        sampled = synced + 2.0 * (position + 1 if overlaps else period)
        ready = max(now, sampled) + 0.5
        row |= {"time/sync": 1.0 if position == 0 else 0.0, "time/generate": 2.0, "time/score": 0.0, "time/update": 2.0}
        row |= {"time/wait": ready - now, "time/clock": ready, "time/sampled_at": sampled}
        clocked.append(row)
        now = ready + 2.0
    return clocked


def completions(rollouts: int, group_size: int = 8, period: int = 10, seed: int = 0) -> list[dict[str, Any]]:
    """Return rows as ``RolloutLog`` writes them."""
    draw = random.Random(seed)
    rows = []
    for rollout in range(rollouts):
        digits = f"{draw.randrange(1000):03d}"
        for sibling in range(group_size):
            right = draw.random() < 0.5
            rows.append(
                {
                    "rollout": rollout,
                    "step": rollout,
                    "prompt": f"Sort {digits} please >",
                    "completion": "".join(sorted(digits)) if right else f"I think {sibling}",
                    "reward": float(right),
                    "advantage": round(draw.gauss(0, 1), 6),
                    "live": rollout % 5 != 0,
                    "behaviour_step": rollout // period * period,
                    "lag": rollout % period,
                    "version": rollout // period,
                    "dropped": 2 if sibling == 0 and rollout % 10 == 0 else None,
                }
            )
    return rows


def write_run(
    folder: Path,
    *,
    config: dict[str, Any] | None = None,
    rows: list[dict[str, float]] | None = None,
    table: list[dict[str, Any]] | None = None,
    period: int = 10,
) -> Path:
    """Write a run folder with these metrics and completions, and return its path."""
    rows = metrics(100) if rows is None else rows
    table = completions(40) if table is None else table
    write_metrics(folder, rows)
    (folder / "config.yaml").write_text(yaml.safe_dump(settings() if config is None else config), encoding="utf-8")
    with (folder / "completions.jsonl").open("w", encoding="utf-8") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in table)
    steps = range(0, int(max(row["step"] for row in rows)) + 1, period)
    with (folder / "syncs.jsonl").open("w", encoding="utf-8") as stream:
        for version, step in enumerate(steps):
            record = {"version": version, "step": step, "checksum": f"{version:016x}", "num_bytes": 435456}
            stream.write(json.dumps({**record, "seconds": 0.009, "rollout": step}) + "\n")
    return folder


def write_metrics(folder: Path, rows: list[dict[str, float]], attempt: int = 0) -> None:
    """Write the metrics of an attempt at a run."""
    file = folder / "metrics" / f"version_{attempt}" / "metrics.csv"
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, fieldnames=sorted({name for row in rows for name in row}))
        writer.writeheader()
        writer.writerows(rows)
