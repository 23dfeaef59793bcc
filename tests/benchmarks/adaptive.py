"""Compare ``AdaptiveWeightSync`` with fixed v on two tasks, paired by seed.

    python -m tests.benchmarks.adaptive            # resumable
    python -m tests.benchmarks.adaptive --report   # tables and plot of the rows so far

Each run appends a row to ``tests/benchmarks/results/adaptive.jsonl``; the tables go into
``tutorials/pages/adaptive_v.md``. Seconds are CPU seconds of one thread without validation, so that
other load on the machine has little effect.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning as L
import yaml

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
PAGE = ROOT / "tutorials" / "pages" / "adaptive_v.md"
TASKS = {"tiny": {}, "harder": {"num_digits": 4}}  # with four digits the model starts at pass@1 = 1/8
ADAPTIVE = "adaptive 0.25"  # with its budget
ARMS = [*(f"v = {v}" for v in (1, 2, 5, 10, 20)), ADAPTIVE]
ROLLOUTS, STAGES = 20, 3
SEEDS = (0, 1, 2, 3, 4)
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Student's t for 95 % intervals, by the number of values."""


class Clock(L.Callback):
    """Records CPU seconds of training, syncs and pass@1 at each validation, and the lag of each step."""

    def __init__(self) -> None:
        self.curve: dict[str, list[float]] = {"step": [], "seconds": [], "syncs": [], "pass@1": []}
        self.lags: list[float] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._start, self._validating = time.process_time(), 0.0

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.lags.append(float((trainer.global_step - batch.behaviour_step).double().mean()))

    def on_validation_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._from = time.process_time()

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if trainer.sanity_checking:
            return
        seconds = self._from - self._start - self._validating
        self._validating += time.process_time() - self._from
        pass_at_1 = float(trainer.callback_metrics["val/pass@1"])
        row = (trainer.global_step, round(seconds, 2), len(trainer.datamodule.engine.state.ledger), round(pass_at_1, 4))
        for name, value in zip(self.curve, row, strict=True):
            self.curve[name].append(value)


def run(job: tuple[str, str, int]) -> dict[str, Any]:
    """Train with the tiny config in this process, built without the CLI because parsing takes seconds."""
    import torch

    import lgrpo
    from lgrpo.cli import quiet_lightning
    from lgrpo.tasks import SortDigits

    task, arm, seed = job
    torch.set_num_threads(1)
    quiet_lightning()
    config = yaml.safe_load((ROOT / "configs" / "tiny.yaml").read_text())
    rate = config["model"]["optimizer"]["init_args"]
    kl_coef = config["model"]["loss"]["init_args"]["kl_coef"]
    problem = config["data"]["task"]["init_args"] | TASKS[task]
    number = float(arm.split()[-1])
    clock = Clock()
    L.seed_everything(seed, verbose=False)
    module = lgrpo.GRPOModule(
        lgrpo.CausalPolicy(**config["model"]["policy"]),
        lgrpo.ClippedLoss(kl_coef=kl_coef),
        lambda parameters: torch.optim.AdamW(parameters, lr=float(rate["lr"]), weight_decay=0.0),
    )
    data = lgrpo.RolloutDataModule(
        SortDigits(**problem),
        num_prompts=config["data"]["num_prompts"],
        group_size=config["data"]["group_size"],
        num_rollouts=ROLLOUTS,
        sampling=lgrpo.Sampling(max_tokens=problem["num_digits"] + 2),
        seed=seed,
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=STAGES,
            gradient_clip_val=1.0,
            default_root_dir=folder,
            logger=False,
            num_sanity_val_steps=0,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[
                lgrpo.SupervisedWarmStart(26),
                lgrpo.WeightSync(int(number)) if arm.startswith("v") else lgrpo.AdaptiveWeightSync(budget=number),
                lgrpo.ReferenceRefresh(),
                lgrpo.ZeroVarianceMask(),
                clock,
            ],
        )
        trainer.fit(module, datamodule=data)
    lag = round(statistics.mean(clock.lags), 3)
    return {"task": task, "arm": arm, "seed": seed, **clock.curve, "lag": lag}


def read() -> list[dict[str, Any]]:
    path = RESULTS / "adaptive.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def sweep(arms: list[str], workers: int) -> None:
    done = {(row["task"], row["arm"], row["seed"]) for row in read()}
    jobs = [job for seed in SEEDS for task in TASKS for arm in arms if (job := (task, arm, seed)) not in done]
    RESULTS.mkdir(exist_ok=True)
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for count, row in enumerate(pool.imap_unordered(run, jobs), start=1):
            with (RESULTS / "adaptive.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{count}/{len(jobs)} {row}", flush=True)


def interval(values: list[float]) -> tuple[float, float]:
    """Return the mean and half the width of its 95 % interval."""
    if len(values) < 2:
        return values[0], math.nan
    return statistics.mean(values), T_95[len(values)] * statistics.stdev(values) / math.sqrt(len(values))


def by_arm(task: str) -> dict[str, dict[int, dict[str, Any]]]:
    """Return the rows of a task by arm and seed, for the seeds that every arm has."""
    rows = [row for row in read() if row["task"] == task]
    arms = {arm: by_seed for arm in ARMS if (by_seed := {row["seed"]: row for row in rows if row["arm"] == arm})}
    shared = set.intersection(*(set(by_seed) for by_seed in arms.values()))
    return {arm: {seed: by_seed[seed] for seed in sorted(shared)} for arm, by_seed in arms.items()}


def seeds(task: str) -> list[int]:
    """Return the seeds that every arm has."""
    return sorted(next(iter(by_arm(task).values())))


def table(task: str) -> str:
    """Return a Markdown table of the arms, with the paired difference to the adaptive one."""
    arms = by_arm(task)
    lines = [
        "| | syncs | mean lag | CPU s | final pass@1 | mean over the run | adaptive minus this: final | mean |",
        "|---|---|---|---|---|---|---|---|",
    ]

    def gain(row: dict[str, Any], over: str) -> float:
        return row["pass@1"][-1] if over == "final" else statistics.mean(row["pass@1"])

    def cell(values: list[float], sign: bool = False) -> str:
        mean, half = interval(values)
        return f"{mean:+.3f} ± {half:.3f}" if sign else f"{mean:.3f} ± {half:.3f}"

    ours = arms.get(ADAPTIVE, {})
    for arm, rows in arms.items():
        differences = [
            cell([gain(ours[seed], over) - gain(rows[seed], over) for seed in rows if seed in ours], sign=True)
            if ours and arm != ADAPTIVE
            else "–"
            for over in ("final", "mean")
        ]
        cells = [
            f"{statistics.mean(row['syncs'][-1] for row in rows.values()):.0f}",
            f"{statistics.mean(row['lag'] for row in rows.values()):.1f}",
            f"{statistics.mean(row['seconds'][-1] for row in rows.values()):.1f}",
            cell([gain(row, "final") for row in rows.values()]),
            cell([gain(row, "mean") for row in rows.values()]),
            *differences,
        ]
        lines.append(f"| {arm} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, grid = plt.subplots(len(TASKS), 2, figsize=(10, 3.6 * len(TASKS)), layout="constrained", squeeze=False)
    fixed = [arm for arm in ARMS if arm.startswith("v")]
    colours = {arm: plt.cm.Blues(0.35 + 0.13 * i) for i, arm in enumerate(fixed)}
    colours[ADAPTIVE] = "#d95f02"
    for (left, right), task in zip(grid, TASKS, strict=True):
        for arm, rows in by_arm(task).items():
            curves = [row["pass@1"] for row in rows.values()]
            means, halves = zip(*(interval(list(values)) for values in zip(*curves, strict=True)), strict=True)
            style = {"color": colours[arm], "marker": "o" if arm in fixed else "s", "markersize": 4}
            seconds = [statistics.mean(s) for s in zip(*(row["seconds"] for row in rows.values()), strict=True)]
            left.plot(seconds, means, label=arm, linewidth=1.4, **style)
            syncs = statistics.mean(row["syncs"][-1] for row in rows.values())
            right.errorbar(syncs, means[-1], yerr=halves[-1], capsize=3, label=arm, **style)
        left.set_xlabel("CPU seconds of training")
        right.set_xlabel("syncs in the run (log)")
        right.set_xscale("log")
        right.set_xticks([3, 6, 12, 30, 60], ["3", "6", "12", "30", "60"])
        right.minorticks_off()
        left.set_title(f"{task}: pass@1 against time, mean of the seeds", fontsize=10)
        right.set_title(f"{task}: final pass@1 against syncs, mean and 95 % interval", fontsize=10)
        for axes in (left, right):
            axes.set_ylabel("held-out pass@1")
            axes.grid(alpha=0.3)
        right.legend(fontsize=7, ncols=2)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="*", default=ARMS, choices=ARMS, help="arms to run")
    parser.add_argument("--workers", type=int, default=1, help="parallel runs, one thread each")
    parser.add_argument("--report", action="store_true", help="write the report without running anything")
    options = parser.parse_args()
    if not options.report:
        os.environ |= {"OMP_NUM_THREADS": "1"}
        sweep(options.arms, options.workers)
    text = "\n\n".join(f"**{task}** (seeds {', '.join(map(str, seeds(task)))})\n\n{table(task)}" for task in TASKS)
    before, _, rest = PAGE.read_text(encoding="utf-8").partition("<!-- tables -->\n")
    PAGE.write_text(
        f"{before}<!-- tables -->\n\n{text}\n\n<!-- end -->{rest.partition('<!-- end -->')[2]}", encoding="utf-8"
    )
    draw(RESULTS / "adaptive.png")
    print(text)


if __name__ == "__main__":
    main()
