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
from collections.abc import Callable, Iterator, Sequence
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

Value = Callable[[dict[str, Any]], float]
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
    comparisons: Sequence[tuple[str, str]] = ()
    """Pairs of arms: the one that is judged, and the one it is compared with."""
    share: tuple[str, str] | None = None
    """Key of the rows whose mean is shown for every arm, and what it is."""
    remark: str = ""
    """Facts about the arms that the comparisons rest on."""


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
        comparisons=[
            ("(10, 1)", "(1, 1)"),
            ("(1, 1) + mask", "(1, 1)"),
            ("(10, 1) + mask", "(10, 1)"),
            ("(1, 10)", "(1, 1)"),
        ],
        share=("reward_spread", "Spread of the reward, which the mask should lower if it stabilises"),
        remark="β is 0.01. (1, 10) takes as many optimizer steps as (1, 1) on a tenth of the completions.",
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
        comparisons=[
            ("mask", "neither"),
            ("sampled again", "neither"),
            ("v = 10: mask", "v = 10: neither"),
            *((f"{v}{name} (β = 0)", f"{v}neither, β = 0") for v in ("", "v = 10: ") for name in ("RL-ZVP", "MCPO")),
        ],
        share=("reward_spread", "Spread of the reward"),
        remark="Completions that were sampled and discarded do not count here. RL-ZVP differs from the arm it is "
        "compared with in these groups, and in the ε of the advantage. MCPO also has a wider upper clip, a mean over "
        "completions and another scale of the advantage.",
    ),
    "deviation": Study(
        title="Small groups and the estimate of the standard deviation",
        claim="left open by Mroueh et al.: the estimate is biased in small groups",
        baseline="G = 8, population",
        arms={f"G = {g}, {name}": [*sizes(g), *extra] for g in (4, 8, 16) for name, extra in DEVIATIONS.items()},
        comparisons=[
            *((f"G = {g}, {name}", f"G = {g}, population") for g in (4, 8, 16) for name in ("unbiased", "Bernoulli")),
            ("G = 4, population", "G = 8, population"),
            ("G = 16, population", "G = 8, population"),
        ],
        remark="A step has 128 completions in all arms.",
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
        comparisons=[(arm, "once a stage") for arm in ("every 10 rollouts", "never", "no reference (β = 0)")],
    ),
    "staleness": Study(
        title="Staleness and the denominator of the ratio",
        claim="a ratio that ignores the behaviour policy fails as the lag grows; decoupling fixes it (AReaL)",
        baseline="v = 1, π/α, centre one",
        arms={
            f"v = {v or '∞'}, {name}": [period(v), *extra] for v in (1, 5, 20, None) for name, extra in RATIOS.items()
        },
        comparisons=[
            *(
                (f"v = {v}, {name}", f"v = {v}, π/α, centre one")
                for v in (5, 20, "∞")
                for name in ("naive (π/π_k)", "π/α, centre π_k/α (eq. 6)")
            ),
            *((f"v = {v}, π/α, centre one", "v = 1, π/α, centre one") for v in (5, 20, "∞")),
        ],
        remark="With one step per rollout π/π_k and no ratio have the same gradient, and so have eq. 6 and the "
        "decoupled loss: their rows are equal for every seed.",
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
        comparisons=[
            (f"v = {v}, {arm}", f"v = {v}, {other}")
            for v in (20, "∞")
            for arm, other in (
                ("REC one-side", "REC one-side, IS"),
                ("REC ring", "REC ring, IS"),
                ("REC one-side", "REINFORCE"),
                ("REC one-side, wide clip", "REC one-side"),
                ("RED-Drop", "GRPO"),
                ("RED-Weight", "GRPO"),
            )
        ],
        remark="All arms have the same learning rate, which may suit one method and not another, so these differences "
        "do not rank the methods. The [league](league.md) does, with the best learning rate of each.",
    ),
    "distillation": Study(
        title="Distillation under lag",
        claim="forward KL bears stale samples, reverse KL does not (2606.24143)",
        baseline="v = 1, forward KL",
        arms={f"v = {v}, {name}": [period(v), *own] for v in (1, 8, 64) for name, own in TEACHERS.items()},
        comparisons=[
            *((f"v = {v}, reverse KL", f"v = {v}, forward KL") for v in (1, 8, 64)),
            *((f"v = 64, {name}", f"v = 1, {name}") for name in TEACHERS),
        ],
        remark="All arms have the learning rate of the task's other studies; none was tuned for distillation.",
    ),
    "curriculum": Study(
        title="Prompts drawn by measured pass rates",
        claim="prompts that are neither solved nor hopeless teach more; DAPO samples other groups again instead",
        baseline="v = 1, uniform",
        arms={f"v = {v}, {name}": [*MIXED, period(v), *own] for v in (1, 10) for name, own in CURRICULA.items()},
        budget=25_600,
        comparisons=[
            (f"v = {v}, {arm}", f"v = {v}, {other}")
            for v in (1, 10)
            for arm, other in (
                ("measured", "uniform"),
                ("sampled again", "uniform"),
                ("measured", "sampled again"),
            )
        ],
        share=("zero_variance", "Share of groups in training whose rewards are all equal"),
        remark="Arms are compared at equal completions, with those that were sampled and discarded. The mask of these "
        "groups is on in all arms.",
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


def final(row: dict[str, Any]) -> float:
    """Return the final pass@1 of a row."""
    return float(row["pass@1"][-1])


def compared(study: str, arm: str, other: str, count: int, value: Value = final) -> str:
    """Return the difference of two arms, paired by seed, and what a corrected interval says about it.

    Args:
        study: Name of the study.
        arm: Arm that is judged.
        other: Arm it is compared with.
        count: Number of comparisons that the study makes, for Bonferroni's correction.
        value: Function of a row; by default its final pass@1.
    """
    from lgrpo.report.intervals import paired_difference

    values = [{seed: value(row) for seed, row in by_arm(study).get(name, {}).items()} for name in (arm, other)]
    difference = paired_difference(*values, confidence=1 - 0.05 / count)
    if difference is None or difference.count < 3:
        return f"`{arm}` and `{other}`: fewer than 3 seeds in common"
    verdict = "higher" if difference.mean > difference.half_width else "not distinguished"
    verdict = "lower" if difference.mean < -difference.half_width else verdict
    return f"`{arm}` less `{other}`: {_short(difference)}, {difference.count} seeds: **{verdict}**"


def verdict(study: str) -> str:
    """Return what the rows of a study say about its comparisons, as Markdown."""
    pairs = STUDIES[study].comparisons
    lines = [
        "Differences of final pass@1, paired by seed, with t-intervals at 95 % after Bonferroni's correction for "
        f"{len(pairs)} comparisons:",
        "\n".join(_filled(f"- {compared(study, arm, other, len(pairs))}", "  ") for arm, other in pairs),
    ]
    if STUDIES[study].share is not None:
        key, text = STUDIES[study].share
        means = {arm: statistics.fmean(row[key] for row in rows.values()) for arm, rows in by_arm(study).items()}
        lines.append(f"{text}: {', '.join(f'`{arm}` {mean:.3f}' for arm, mean in means.items())}.")
    if STUDIES[study].remark:
        lines.append(STUDIES[study].remark)
    return "\n\n".join(line if line.startswith("- ") else _filled(line) for line in lines)


def _filled(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 120, break_on_hyphens=False, break_long_words=False, subsequent_indent=indent)


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

Such a small task shows how the algorithms compare on it, not how they would at 7B. Rows with a commit were run at that
commit; older ones have none, and may come from several versions of the code."""

ON_A_GPU = """## SmolLM2-135M on GSM8K

`python -m tests.benchmarks.gsm8k --model SmolLM2-135M-Instruct --data GSM8K --rollouts 36`: the model is first trained
on GSM8K's solutions (three epochs, a minute). Then three arms train it with the settings of
`configs/papers/a_gsm8k.yaml`, except for those the script lists: 36 rollouts of 28 × 16 completions each, six runs at a
time on one H200 in eight minutes. Pass@1 is over GSM8K's whole test set, four samples per problem at temperature 0.7;
it was 0.053 before:

{gsm8k}

Two seeds of a model that solves so few problems, in 36 steps, decide nothing; the 1.5B model above does. How long a
rollout takes at different v: [Speed](speed.md#on-one-h200), [Overlap](overlap.md#measured-on-one-gpu)."""


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
        parts.append(verdict(name))
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
