"""The papers' comparisons on the task of ``configs/tiny.yaml``, ten seeds each.

    python -m tests.benchmarks.studies                    # all studies, two runs in parallel; resumable
    python -m tests.benchmarks.studies ablation --seeds 3 # one study
    python -m tests.benchmarks.studies --report           # page and plots of the rows so far

Each run appends a row to ``tests/benchmarks/results/studies.jsonl``. The page is ``tutorials/pages/results.md``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.benchmarks import gsm8k, real_model_report
from tests.benchmarks.environments import origin

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
ROWS = RESULTS / "studies.jsonl"
PAGE = ROOT / "tutorials" / "pages" / "results.md"
SEEDS = 10

Arms = dict[str, list[str]]
"""Settings by the name of an arm, as arguments of ``lgrpo fit`` after ``--config configs/tiny.yaml``."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """Arms that are compared with a baseline, paired by seed."""

    title: str
    claim: str
    """Claim of the paper."""
    baseline: str
    arms: Arms = field(default_factory=dict)
    rows_of: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Arms with the settings of another study's arm, which are not run again: study and arm by the own name."""
    budget: int | None = None
    """Number of completions at which arms are compared, with those that were sampled and discarded; None: all."""


def overlay(name: str) -> str:
    return f"--config=configs/{name}.yaml"


def period(v: int | None) -> str:
    return f"--weight_sync.period={'null' if v is None else v}"


NO_MASK = "--zero_variance_mask=null"
TEN_STEPS = ["--data.reuse=10", "--data.num_rollouts=4"]


def sizes(group: int) -> list[str]:
    """Return the settings for 128 completions per rollout in groups of this size."""
    return [f"--data.group_size={group}", f"--data.num_prompts={128 // group}"]


DEVIATIONS = {
    "population": [],
    "unbiased": ["--data.advantage.init_args.unbiased=true"],
    "Bernoulli": [
        "--data.advantage=lgrpo.advantages.ComposedAdvantage",
        "--data.advantage.init_args.baseline=lgrpo.advantages.GroupMean",
        "--data.advantage.init_args.scale=lgrpo.advantages.BernoulliStd",
    ],
}
RATIOS = {
    "naive (π/π_k)": ["--model.loss.init_args.ratio=proximal"],
    "π/α, centre one": [],
    "π/α, centre π_k/α (eq. 6)": ["--model.loss.init_args.centre=proximal"],
    "decoupled": ["--model.loss.init_args.centre=proximal_multiplicative"],
    "no ratio": ["--model.loss.init_args.ratio=none"],
}
PAPER_B = {
    "reinforce": "REINFORCE",
    "grpo": "GRPO",
    "rec_oneside_is": "REC one-side, IS",
    "rec_oneside_nois": "REC one-side",
    "rec_oneside_wide": "REC one-side, wide clip",
    "rec_twoside_is": "REC two-side, IS",
    "rec_twoside_nois": "REC two-side",
    "rec_ring_is": "REC ring, IS",
    "rec_ring_nois": "REC ring",
    "red_drop": "RED-Drop",
    "red_weight": "RED-Weight",
    "opmd": "OPMD",
    "opmd_log_mean_exp": "OPMD, log-mean-exp",
    "asymre": "AsymRE",
}

TAUGHT = {
    "neither, β = 0": [NO_MASK, "--model.loss.init_args.kl_coef=0", "--reference_refresh=null"],
    "RL-ZVP (β = 0)": [overlay("algorithms/rl_zvp")],
    "MCPO (β = 0)": [overlay("algorithms/mcpo")],
}
"""Treatments of groups whose rewards are all equal, without a KL to the reference, as RL-ZVP and MCPO have none."""

TEACHER = ROOT / "build" / "teacher"
"""Folder of the teacher, which is made once: the policy of a run on rewards with more steps."""
TEACHER_RUN = [period(1), "--seed_everything=100", "--trainer.max_epochs=12"]
DISTIL = [
    overlay("distil"),
    f"--model.loss.regularisers.teacher.name={TEACHER}",
    "--model.loss.regularisers.teacher.dtype=float32",
]
TEACHERS = {
    "rewards": ["--model.loss.init_args.kl_coef=0", "--reference_refresh=null"],
    "forward KL": [*DISTIL, "--model.loss.regularisers.direction=forward"],
    "reverse KL": [*DISTIL, "--model.loss.regularisers.direction=reverse"],
}

TEACHER_SUBJECTS = {"Forward KL": "forward KL", "Reverse KL": "reverse KL", "Training on rewards": "rewards"}
"""Beginning of a sentence about an arm."""

MIXED = [
    "--data.task=tests.benchmarks.mixed.SortMixed",
    "--data.sampling.max_tokens=7",
    "--data.num_rollouts=20",
    "--trainer.max_epochs=10",
    "--model.loss.init_args.kl_coef=0",
    "--reference_refresh=null",
]
CURRICULA = {
    "uniform": [],
    "measured": [overlay("curriculum")],
    "sampled again": ["--data.dynamic_sampling.max_rounds=4"],
}

STUDIES = {
    "ablation": Study(
        title="Paper A: the ablation",
        claim="the mask stabilises; v = 10 matches v = 1; several steps per rollout are slower (Mroueh et al.)",
        baseline="(1, 1)",
        arms={
            "(1, 1)": [period(1), NO_MASK],
            "(1, 1) + mask": [period(1)],
            "(10, 1)": [period(10), NO_MASK],
            "(10, 1) + mask": [period(10)],
            "(1, 10)": [period(1), NO_MASK, *TEN_STEPS],
        },
    ),
    "zero_variance": Study(
        title="Groups whose rewards are all equal",
        claim="DAPO samples them again; Mroueh et al. mask them; RL-ZVP and MCPO learn from them",
        baseline="neither",
        arms={
            "neither": [period(1), NO_MASK],
            "mask": [period(1)],
            "sampled again": [period(1), NO_MASK, "--data.dynamic_sampling.max_rounds=4"],
            **{name: [period(1), *own] for name, own in TAUGHT.items()},
            "v = 10: neither": [period(10), NO_MASK],
            "v = 10: mask": [period(10)],
            **{f"v = 10: {name}": [period(10), *own] for name, own in TAUGHT.items()},
        },
        rows_of={"v = 10: neither": ("ablation", "(10, 1)"), "v = 10: mask": ("ablation", "(10, 1) + mask")},
    ),
    "deviation": Study(
        title="Small groups and the estimate of the standard deviation",
        claim="left open by Mroueh et al.: the estimate is biased in small groups",
        baseline="G = 8, population",
        arms={f"G = {g}, {name}": [*sizes(g), *extra] for g in (4, 8, 16) for name, extra in DEVIATIONS.items()},
    ),
    "refresh": Study(
        title="When the reference is refreshed",
        claim="each refresh amplifies the success rate (Mroueh et al.); β is 0.1 here, so that it has an effect",
        baseline="once a stage",
        arms={
            "once a stage": ["--model.loss.init_args.kl_coef=0.1"],
            "every 10 rollouts": ["--model.loss.init_args.kl_coef=0.1", "--reference_refresh.period=10"],
            "never": ["--model.loss.init_args.kl_coef=0.1", "--reference_refresh=null"],
            "no reference (β = 0)": ["--model.loss.init_args.kl_coef=0", "--reference_refresh=null"],
        },
    ),
    "staleness": Study(
        title="Staleness and the denominator of the ratio",
        claim="a ratio that ignores the behaviour policy fails as the lag grows; decoupling fixes it (AReaL)",
        baseline="v = 1, π/α, centre one",
        arms={
            f"v = {v or '∞'}, {name}": [period(v), *extra] for v in (1, 5, 20, None) for name, extra in RATIOS.items()
        },
    ),
    "paper_b": Study(
        title="Paper B: REINFORCE and its relatives, off-policy",
        claim="importance sampling does not matter, clips do; wide clips learn faster; RED beats GRPO (Yao et al.)",
        baseline="v = 20, GRPO",
        arms={
            f"v = {v or '∞'}, {name}": [overlay(f"algorithms/{method}"), period(v)]
            for v in (20, None)
            for method, name in PAPER_B.items()
        },
    ),
    "distillation": Study(
        title="Distillation under lag",
        claim="forward KL bears stale samples, reverse KL does not (2606.24143)",
        baseline="v = 1, forward KL",
        arms={f"v = {v}, {name}": [period(v), *own] for v in (1, 8, 64) for name, own in TEACHERS.items()},
    ),
    "curriculum": Study(
        title="Prompts drawn by measured pass rates",
        claim="prompts that are neither solved nor hopeless teach more; DAPO samples other groups again instead",
        baseline="v = 1, uniform",
        arms={f"v = {v}, {name}": [*MIXED, period(v), *own] for v in (1, 10) for name, own in CURRICULA.items()},
        budget=25_600,
    ),
}


def run(study: str, arm: str, seed: int) -> dict[str, Any]:
    """Run one arm in this process."""
    import torch

    from lgrpo.cli import quiet_lightning
    from lgrpo.commands.fit import LGRPOCLI
    from lgrpo.report import read_series

    torch.set_num_threads(1)
    quiet_lightning()
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        cli = LGRPOCLI(
            [
                "fit",
                overlay("tiny"),
                *STUDIES[study].arms[arm],
                f"--seed_everything={seed}",
                f"--run={folder}/run",
                "--trainer.enable_progress_bar=false",
                "--trainer.enable_checkpointing=false",
            ]
        )
        seconds = time.perf_counter() - start
        series = read_series(Path(folder) / "run")
        syncs = len((Path(folder) / "run" / "syncs.jsonl").read_text().splitlines())
    rewards = [value for _, value in series["rollout/reward"]]
    last = rewards[-(len(rewards) // 4) :]
    completions = (
        cli.trainer.global_step // cli.datamodule.reuse * cli.datamodule.num_prompts * cli.datamodule.group_size
    )
    budget = STUDIES[study].budget
    own = {} if budget is None else at_equal_completions(series, completions // len(rewards), budget)
    return {
        "study": study,
        "arm": arm,
        "seed": seed,
        "pass@1": [round(value, 4) for _, value in series["val/pass@1"]],
        "reward_last_quarter": round(statistics.fmean(last), 4),
        "reward_spread": round(statistics.pstdev(last), 4),
        "kl_behaviour_max": round(max(value for _, value in series["train/kl_behaviour"]), 4),
        "steps": cli.trainer.global_step,
        "completions": completions,
        "syncs": syncs,
        "seconds": round(seconds, 1),
    } | own


def at_equal_completions(series: dict[str, list[tuple[int, float]]], size: int, budget: int) -> dict[str, Any]:
    """Return what a row has instead, up to the budget: the last pass@1 is interpolated there.

    Args:
        series: Metrics of a run with one optimizer step for each rollout.
        size: Completions in a rollout.
        budget: Number of completions, with those that were sampled and discarded.
    """
    again = dict(series.get("rollout/resampled_fraction", []))
    zero_variance = [value for _, value in series["rollout/zero_variance_fraction"]]
    sampled = [0.0]
    for step in range(len(zero_variance)):
        sampled.append(sampled[-1] + size * (1 + again.get(step, 0.0)))
    if sampled[-1] < budget:
        raise ValueError(f"the run has sampled {sampled[-1]:.0f} completions, fewer than the budget of {budget}")
    points = [(sampled[step], value) for step, value in series["val/pass@1"]]
    before = [point for point in points if point[0] < budget]
    (x0, y0), (x1, y1) = before[-1], points[len(before)]
    before.append((budget, y0 + (y1 - y0) * (budget - x0) / (x1 - x0)))
    steps = sum(total < budget for total in sampled)
    return {
        "pass@1": [round(value, 4) for _, value in before],
        "at": [round(total) for total, _ in before],
        "zero_variance": round(statistics.fmean(zero_variance[:steps]), 4),
        "steps": steps,
        "completions": budget,
    }


def work(job: tuple[str, str, int]) -> dict[str, Any]:
    try:
        return run(*job)
    except Exception as error:
        names = dict(zip(("study", "arm", "seed"), job, strict=True))
        return names | {"error": f"{type(error).__name__}: {error}"[:300]}


def read() -> list[dict[str, Any]]:
    return [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []


def planned(names: list[str], seeds: int) -> Iterator[tuple[str, str, int]]:
    """Yield missing runs seed by seed, so that early results cover all arms."""
    done = {(row["study"], row["arm"], row["seed"]) for row in read() if "error" not in row}
    for seed in range(seeds):
        for name in names:
            for arm in STUDIES[name].arms:
                if (name, arm, seed) not in done and arm not in STUDIES[name].rows_of:
                    yield name, arm, seed


def make_teacher() -> None:
    """Train the teacher of the study on distillation, unless it is there."""
    if TEACHER.exists():
        return
    with tempfile.TemporaryDirectory() as folder:
        commands = (
            ["fit", overlay("tiny"), *TEACHER_RUN, f"--run={folder}/run"],
            ["export", f"{folder}/run", str(TEACHER)],
        )
        for command in commands:
            subprocess.run([sys.executable, "-m", "lgrpo.cli", *command], cwd=ROOT, check=True)


def launch(names: list[str], seeds: int, workers: int, commit: str | None) -> None:
    jobs, shared = list(planned(names, seeds)), origin(commit)
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    if "distillation" in names:
        make_teacher()
    with multiprocessing.get_context("spawn").Pool(workers, maxtasksperchild=20) as pool:
        for count, row in enumerate(pool.imap_unordered(work, jobs), start=1):
            with ROWS.open("a") as file:
                file.write(json.dumps(row | shared, ensure_ascii=False) + "\n")
            final = row.get("error") or row["pass@1"][-1]
            print(f"{count}/{len(jobs)} {row['study']}, {row['arm']}, seed {row['seed']}: {final}", flush=True)


def by_arm(study: str) -> dict[str, dict[int, dict[str, Any]]]:
    """Return the rows of a study by arm and seed."""
    found: dict[tuple[str, str], dict[int, dict[str, Any]]] = defaultdict(dict)
    for row in read():
        if "error" not in row:
            found[row["study"], row["arm"]][row["seed"]] = row
    names = {arm: (study, arm) for arm in STUDIES[study].arms} | STUDIES[study].rows_of
    return {arm: found[key] for arm, key in names.items() if key in found}


def table(study: str) -> str:
    """Return a table of final pass@1, its paired difference to the baseline, and the spread of the last quarter."""
    from lgrpo.report.intervals import mean_interval, paired_difference

    rows = by_arm(study)
    finals = {arm: {seed: row["pass@1"][-1] for seed, row in seeds.items()} for arm, seeds in rows.items()}
    baseline = finals.get(STUDIES[study].baseline, {})
    lines = [
        "| arm | seeds | final pass@1 ± 95% | less baseline ± 95% | collapsed | spread | largest KL | completions "
        "| syncs | seconds |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for arm, seeds in rows.items():
        mean = mean_interval(list(finals[arm].values()))
        shared = finals[arm].keys() & baseline.keys()
        less = (
            ""
            if arm == STUDIES[study].baseline or len(shared) < 2
            else _short(paired_difference(finals[arm], baseline))
        )
        collapsed = sum(row["pass@1"][-1] < row["pass@1"][0] / 2 for row in seeds.values())
        spread = statistics.fmean(row["reward_spread"] for row in seeds.values())
        one = next(iter(seeds.values()))
        cells = [
            arm,
            len(seeds),
            _short(mean),
            less,
            collapsed,
            f"{spread:.3f}",
            f"{statistics.median(row['kl_behaviour_max'] for row in seeds.values()):.2g}",
            f"{one['completions']:,}",
            one["syncs"],
            f"{statistics.median(row['seconds'] for row in seeds.values()):.0f}",
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _short(interval: Any) -> str:
    return f"{interval.mean:.3f} ± {interval.half_width:.3f}" if interval.count > 1 else f"{interval.mean:.3f}"


def draw(study: str, path: Path) -> None:
    from matplotlib.figure import Figure

    from lgrpo.report.intervals import mean_interval

    rows = by_arm(study)
    if STUDIES[study].budget is not None:
        return draw_curves(study, path)
    names = list(rows)[::-1]
    figure = Figure(figsize=(8, 0.28 * len(names) + 1.5), layout="constrained")
    axes = figure.add_subplot()
    start = statistics.fmean(row["pass@1"][0] for seeds in rows.values() for row in seeds.values())
    axes.axvline(start, color="black", linewidth=0.8, linestyle=":", label="start (mean)")
    for y, name in enumerate(names):
        values = [row["pass@1"][-1] for row in rows[name].values()]
        interval = mean_interval(values)
        axes.plot(values, [y] * len(values), "o", color="#9db7d5", markersize=3, label=None if y else "seeds")
        half = 0.0 if interval.count < 2 else interval.half_width
        label = None if y else "mean, 95%"
        axes.errorbar(interval.mean, y, xerr=half, fmt="o", color="#2a6fbb", markersize=5, capsize=3, label=label)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(-0.7, len(names) - 0.3)
    axes.set_xlabel("final pass@1")
    axes.grid(axis="x", alpha=0.3)
    figure.legend(fontsize=8, ncols=3, loc="outside upper center")
    figure.savefig(path, dpi=130)


def draw_curves(study: str, path: Path) -> None:
    """Draw pass@1 over the number of completions, mean and 95% interval over seeds."""
    import numpy as np
    from matplotlib.figure import Figure

    from lgrpo.report.intervals import mean_interval

    rows, budget = by_arm(study), STUDIES[study].budget
    totals = np.linspace(0, budget, 11)
    periods = list(dict.fromkeys(arm.partition(",")[0] for arm in rows))
    figure = Figure(figsize=(4.5 * len(periods), 3.6), layout="constrained")
    for column, v in enumerate(periods, start=1):
        axes = figure.add_subplot(1, len(periods), column, title=v, xlabel="completions", ylabel="pass@1")
        for arm, seeds in rows.items():
            if arm.partition(",")[0] != v:
                continue
            curves = np.array([np.interp(totals, row["at"], row["pass@1"]) for row in seeds.values()])
            intervals = [mean_interval(values.tolist()) for values in curves.T]
            halves = [interval.half_width if interval.count > 1 else 0.0 for interval in intervals]
            means = [interval.mean for interval in intervals]
            axes.errorbar(totals, means, yerr=halves, marker="o", markersize=3, capsize=2, label=arm.partition(", ")[2])
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=130)


def compared(study: str, arm: str, other: str, value: Callable[[dict[str, Any]], float] | None = None) -> str:
    """Return how the final pass@1 of an arm, or another value of its rows, compares with another, paired by seed."""
    from lgrpo.report.intervals import paired_difference

    value = value or (lambda row: row["pass@1"][-1])
    finals = [{seed: value(row) for seed, row in by_arm(study)[name].items()} for name in (arm, other)]
    difference = paired_difference(*finals)
    interval = f"{_short(difference)}, {difference.count} seeds"
    if abs(difference.mean) <= difference.half_width:
        return f"does not differ significantly from {other} ({interval})"
    return f"ends {'higher' if difference.mean > 0 else 'lower'} than {other} ({interval})"


def zero_variance_verdict() -> str:
    """Return the summary of the study on groups whose rewards are all equal."""
    rows = by_arm("zero_variance")

    def spread(arm: str) -> float:
        return statistics.fmean(row["reward_spread"] for row in rows[arm].values())

    parts = [
        f"per step, sampling these groups again {compared('zero_variance', 'sampled again', 'neither')}, "
        f"with a spread of {spread('sampled again'):.3f} against {spread('neither'):.3f}. The table counts completions "
        "that are trained on; discarded ones come on top.",
        f"The mask {compared('zero_variance', 'mask', 'neither')}.",
    ]
    for prefix, when in (("", "At v = 1"), ("v = 10: ", "At v = 10")):
        zvp, mcpo = (
            compared("zero_variance", f"{prefix}{name} (β = 0)", f"{prefix}neither, β = 0").replace(prefix, "")
            for name in ("RL-ZVP", "MCPO")
        )
        parts.append(f"{when}, RL-ZVP {zvp}, and MCPO {mcpo}.")
    parts.append(
        "RL-ZVP differs from that arm in these groups, and in the ε of the advantage. MCPO also has a wider upper "
        "clip, a mean over completions and another scale of the advantage."
    )
    return " ".join(parts)


def distillation_verdict() -> str:
    """Return the summary of the study on distillation."""
    rows = by_arm("distillation")
    if len(rows) < len(STUDIES["distillation"].arms) or any(len(seeds) < 2 for seeds in rows.values()):
        return "the runs so far are too few to compare."
    parts = [
        f"{'at' if v == 1 else 'At'} v = {v}, reverse KL "
        f"{compared('distillation', f'v = {v}, reverse KL', f'v = {v}, forward KL')}."
        for v in (1, 8, 64)
    ]
    parts += [
        f"{subject} at v = 64 {compared('distillation', f'v = 64, {name}', f'v = 1, {name}')}."
        for subject, name in TEACHER_SUBJECTS.items()
    ]
    return " ".join(
        [*parts, "All arms have the learning rate of the task's other studies; none was tuned for distillation."]
    )


def curriculum_verdict() -> str:
    """Return the summary of the study on curricula."""
    rows = by_arm("curriculum")
    if len(rows) < len(STUDIES["curriculum"].arms) or any(len(seeds) < 2 for seeds in rows.values()):
        return "the runs so far are too few to compare."

    def share(arm: str) -> str:
        return f"{statistics.fmean(row['zero_variance'] for row in rows[arm].values()):.2f}"

    parts = []
    for v in (1, 10):
        uniform, measured, again = (f"v = {v}, {name}" for name in CURRICULA)
        parts += [
            f"at v = {v} and equal completions, measured {compared('curriculum', measured, uniform)}, and sampling "
            f"again {compared('curriculum', again, uniform)}; measured {compared('curriculum', measured, again)}.",
            f"The share of groups in training whose rewards are all equal is {share(uniform)} with uniform, "
            f"{share(measured)} with measured and {share(again)} with sampling again: measured "
            f"{compared('curriculum', measured, uniform, lambda row: row['zero_variance'])} in this.",
        ]
    text = " ".join(parts).replace(" at v = 10 and", " At v = 10 and")
    return f"{text} Completions that were sampled and discarded count; the mask of these groups is on in all arms."


VERDICTS: dict[str, str | Callable[[], str]] = {
    "ablation": (
        "v = 10 matches v = 1 to 0.02, with a tenth of the syncs: confirmed. The mask changes neither pass@1 nor the "
        "spread significantly, so its stabilising effect is not visible on this task (β is 0.01, and no seed is "
        "unstable without it). Ten steps per rollout end 0.21 lower after as many optimizer steps: slower, as the "
        "paper says. But they have then seen a tenth of the completions; (1, 1) was at 0.50 after twice as many, so "
        "per completion reuse is ahead here."
    ),
    "zero_variance": zero_variance_verdict,
    "distillation": distillation_verdict,
    "curriculum": curriculum_verdict,
    "deviation": (
        "no estimate differs significantly from another at any G, 4 included: the bias of small groups costs nothing "
        "here. Fewer and larger groups (G = 16) end slightly lower, at the limit of significance; a step has 128 "
        "completions in all rows."
    ),
    "refresh": (
        "a reference that is never refreshed ends 0.03 lower (-0.029 ± 0.027). Once a stage, every ten rollouts and no "
        "reference do not differ significantly, so amplification by each refresh is not visible beyond that."
    ),
    "staleness": (
        "without a ratio pass@1 falls with the lag (0.79, 0.75, 0.61 at v = 1, 5, 20), and π/α prevents this (0.81, "
        "0.83, 0.77), as in AReaL's table. Offline the order is reversed: π/α clipped around one stops at 0.52 and "
        "stays nearest to α (0.29 nats), while no ratio reaches 0.75 and clips around π_k/α 0.77. No run collapsed. "
        "With one step per rollout π/π_k and no ratio have the same gradient, and so have eq. 6 and the decoupled "
        "loss: their rows are equal for every seed."
    ),
    "paper_b": (
        "importance sampling does not help: without it one-side (0.80 against 0.71) and ring (0.77 against 0.64) end "
        "higher at v = 20, and two-side does not differ significantly (0.45 against 0.50). Clips matter: REINFORCE has "
        "0.51, one-side 0.80. A wide clip makes no difference at v = 20 and gains 0.2 offline (0.72 against 0.54). "
        "RED-Weight is 0.06 behind GRPO at v = 20 and 0.24 ahead offline (0.76 against 0.53); RED-Drop is behind GRPO "
        "in both, so the claim that RED beats GRPO holds for RED-Weight offline only. OPMD with the log-mean-exp "
        "baseline collapses in every run; with the default of its authors' code, the mean, it collapses in none and "
        "ends near REINFORCE, of which it is half the loss (0.46 at v = 20, 0.37 offline)."
    ),
}
"""Summary of each study, or a function that computes it. Texts with numbers must be rewritten when seeds are added."""

INTRODUCTION = """# Results

A study on a real model, which is not complete yet, and the papers' comparisons on a small task. Written by
`python -m tests.benchmarks.studies --report`: tables and pictures are computed from rows."""

SMALL_TASK = """## The papers' comparisons on a small task

Rows: [studies.jsonl](../../tests/benchmarks/results/studies.jsonl). Every run is `configs/tiny.yaml` (a model of 108
thousand parameters learns to sort three digits; 200 optimizer steps of 128 completions) with the settings listed in
`tests/benchmarks/studies.py`. pass@1 is over 128 held-out problems with 8 samples each; a completion has at most five
tokens.

- *Less baseline* is paired by seed. If its interval contains 0, these seeds do not separate the two arms.
- *Collapsed* is the number of seeds that end below half of their initial pass@1.
- *Spread* is the standard deviation of the rollouts' reward over the last quarter.
- *Largest KL* is the largest divergence from the behaviour policy (`train/kl_behaviour`), median over seeds.
- *Seconds* is the time of a run, median over seeds, two runs at a time on two cores. Seeds were run on several days,
  partly with other load, so it shows the cost of a row, not which is faster.

All {runs} runs, ten seeds an arm, take about three hours; the command can be stopped and restarted. Arms that have
fewer seeds so far are compared over those.

Such a small task shows how the algorithms compare on it, not how they would at 7B. **No row was run on a GPU**, except
for those of the real model and in the last section."""

ON_A_GPU = """## On a GPU

**GSM8K** (`python -m tests.benchmarks.gsm8k --model SmolLM2-135M-Instruct --data GSM8K --rollouts 36`): the
model is first trained on GSM8K's solutions (three epochs, a minute). Then three arms train it with the settings of
`configs/papers/a_gsm8k.yaml`, except for those the script lists: 36 rollouts of 28 × 16 completions each, six runs at a
time on one H200 in eight minutes. The rows are read from the runs' folders. Pass@1 is over GSM8K's whole test set, four
samples per problem at temperature 0.7; it was 0.053 before:

{gsm8k}

**No difference is significant.** Pass@1 ends between 0.049 and 0.064; twice the standard error over 1,319 problems is
0.008, and the two seeds of an arm differ by up to 0.011. Whether the mask stabilises, or v = 10 matches v = 1, cannot
be decided at this size: a model of 135M solves one problem in seventeen, in six groups of ten all rewards are equal,
and 36 steps are few. Four syncs instead of 36 (kl_behaviour at most 0.010 instead of 0.003) do no visible harm. Not run
on a GPU: (10, 1) without the mask, (1, 10), more seeds, the other studies.

**Throughput of v** (Mroueh et al.: v = 10 has 1.35 times the rollouts of v = 1, at 7B with one GPU that serves and
seven that train). On one GPU, engine and trainer take turns, and a larger v saves syncs, sleeping and waking, and the
ends of calls ("of 320": each engine decodes 320 completions at a time):

| one H200, vLLM 0.26 | v = 1 | v = 10 | generate | syncs |
|---|---:|---:|---:|---:|
| [1.5B](speed.md#on-one-h200), 448 × 512, two engines of 320 (G there) | 10.7 s | 10.1 s | 5.0, 4.4 s | 0.03, 0.003 s |
| two of 320, that machine, realistic lengths (mean 300) | 9.6 s | 7.1 s | 5.7, 3.2 s | 0.03, 0.003 s |
| two of 320, another machine (H; v = 2: 10.7 s, v = 5: 10.0 s) | 10.8 s | 10.1 s | 5.1, 4.4 s | 0.06, 0.004 s |
| two of 320, another machine (F) | 12.1 s | 11.2 s | 6.0, 5.3 s | 0.08, 0.01 s |
| two of 320, that machine, realistic lengths | 10.3 s | 9.1 s | 6.1, 4.8 s | 0.08, 0.01 s |
| two of 320, another machine (A) | 12.5 s | 10.4 s | 6.5, 4.5 s | 0.07, 0.01 s |
| two of 512, another machine (B) | 11.4 s | 11.0 s | 5.4, 5.0 s | 0.07, 0.01 s |
| two of 512, that machine, realistic lengths | 10.8 s | 9.8 s | 6.4, 5.3 s | 0.08, 0.01 s |
| two of about 245, another day (C) | 10.9 s | 11.1 s | 5.0, 5.1 s | 0.07, 0.01 s |
| two of about 450, another day (D), all activations kept | 10.7 s | 9.3 s | 4.7, 3.6 s | 0.17, 0.01 s |
| [448 × 512](speed.md#before-packing) before packing, one engine | 23.5 s | 23.3 s | 11.2, 11.9 s | 0.50, 0.05 s |
| [7B with LoRA](lora.md#7b-on-one-card), 128 × 256 tokens, one engine | 9.1 s | 7.0 s | 2.5, 1.5 s | 0.30, 0.02 s |

v = 10 has 1.04 to 1.20 times the rollouts of v = 1 at 1.5B (no more than v = 1 on C, where each engine decoded about
245 completions at a time), 1.10 to 1.36 times with realistic lengths, and 1.29 times at 7B with LoRA (8.5 against 6.6
per minute; one rollout at v = 1, one cycle at v = 10). At 7B a rollout saves 2.0 s: 1.1 s because one long generation
replaces ten short ones, so that the engine is never half empty (22,200 tokens per second instead of 12,900), and 0.9 s
of syncs, sleeping and waking, with 14.7 GiB to the host and back; the update is the same. This is near the paper's
1.35, but for another reason: there servers sample while others train. [The simulation](simulation.md) predicts the
effect of that.
"""


def page() -> str:
    """Return the page with all studies that have rows."""
    runs = SEEDS * sum(len(study.arms) - len(study.rows_of) for study in STUDIES.values())
    parts = [INTRODUCTION, real_model_report.section(), SMALL_TASK.format(runs=runs)]
    for name, study in STUDIES.items():
        parts.append(f"## {study.title}\n\nThe claim: {study.claim}.")
        if not by_arm(name):
            parts.append(f"Not run yet: `python -m tests.benchmarks.studies {name}`.")
            continue
        picture = f"../../tests/benchmarks/results/study_{name}.png"
        parts += [f"![{study.title}]({picture})", table(name)]
        if name in VERDICTS:
            verdict = VERDICTS[name]
            text = verdict() if callable(verdict) else verdict
            parts.append(textwrap.fill(f"**Here:** {text}", 120, break_on_hyphens=False))
    return "\n\n".join([*parts, ON_A_GPU.format(gsm8k=gsm8k.table())])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="*", help=f"studies to run: {', '.join(STUDIES)}; all by default")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--workers", type=int, default=2, help="parallel runs, one thread each")
    parser.add_argument("--commit", help="commit to note in the rows, where git does not know it")
    parser.add_argument("--report", action="store_true", help="write the report without running anything")
    options = parser.parse_args()
    if unknown := set(options.studies) - set(STUDIES):
        parser.error(f"unknown study {', '.join(sorted(unknown))}; choose from {', '.join(STUDIES)}")
    names = options.studies or list(STUDIES)
    if not options.report:
        launch(names, options.seeds, options.workers, options.commit)
    for name in names:
        if by_arm(name):
            draw(name, RESULTS / f"study_{name}.png")
            print(f"\n{STUDIES[name].title}\n\n{table(name)}")
    PAGE.write_text(page(), encoding="utf-8")
    if failed := [row for row in read() if "error" in row]:
        print(f"\n{len(failed)} runs failed:", *failed, sep="\n")


if __name__ == "__main__":
    main()
