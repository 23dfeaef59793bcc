"""The papers' comparisons on the task of ``configs/tiny.yaml``, ten seeds each.

    python -m tests.benchmarks.studies                    # all of them, two runs at a time; stop it and it goes on
    python -m tests.benchmarks.studies ablation --seeds 3 # some of it
    python -m tests.benchmarks.studies --report           # the page and the pictures, of what is there

Each run appends a row to ``tests/benchmarks/results/studies.jsonl``. The page is ``tutorials/pages/results.md``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.benchmarks import gsm8k

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
ROWS = RESULTS / "studies.jsonl"
PAGE = ROOT / "tutorials" / "pages" / "results.md"
SEEDS = 10

Arms = dict[str, list[str]]
"""Settings by the name of an arm, as ``lgrpo fit`` takes them behind ``--config configs/tiny.yaml``."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """Arms that are compared with one of them, seed by seed."""

    title: str
    claim: str
    """What the paper says."""
    baseline: str
    arms: Arms = field(default_factory=dict)


def overlay(name: str) -> str:
    return f"--config=configs/{name}.yaml"


def period(v: int | None) -> str:
    return f"--weight_sync.period={'null' if v is None else v}"


NO_MASK = "--zero_variance_mask=null"
TEN_STEPS = ["--data.reuse=10", "--data.num_rollouts=4"]


def sizes(group: int) -> list[str]:
    """128 completions in a rollout, whatever the size of the groups."""
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
    "asymre": "AsymRE",
}

STUDIES = {
    "ablation": Study(
        title="Paper A: the ablation",
        claim="the mask stabilises; v = 10 matches v = 1; several steps on a rollout are slower (Mroueh et al.)",
        baseline="(1, 1)",
        arms={
            "(1, 1)": [period(1), NO_MASK],
            "(1, 1) + mask": [period(1)],
            "(10, 1)": [period(10), NO_MASK],
            "(10, 1) + mask": [period(10)],
            "(1, 10)": [period(1), NO_MASK, *TEN_STEPS],
        },
    ),
    "dull_groups": Study(
        title="Groups whose rewards are all equal",
        claim="DAPO samples them again; Mroueh et al. mask them",
        baseline="neither",
        arms={
            "neither": [period(1), NO_MASK],
            "mask": [period(1)],
            "sampled again": [period(1), NO_MASK, "--data.dynamic_sampling.max_rounds=4"],
        },
    ),
    "deviation": Study(
        title="Small groups, and which standard deviation divides",
        claim="left open by Mroueh et al.: the estimate is biased in small groups",
        baseline="G = 8, population",
        arms={f"G = {g}, {name}": [*sizes(g), *own] for g in (4, 8, 16) for name, own in DEVIATIONS.items()},
    ),
    "refresh": Study(
        title="When the reference follows",
        claim="each refresh amplifies the success rate (Mroueh et al.); β is 0.1 here, so that it matters",
        baseline="once a stage",
        arms={
            "once a stage": ["--model.loss.init_args.kl_coef=0.1"],
            "every 10 rollouts": ["--model.loss.init_args.kl_coef=0.1", "--reference_refresh.period=10"],
            "never": ["--model.loss.init_args.kl_coef=0.1", "--reference_refresh=null"],
            "no reference (β = 0)": ["--model.loss.init_args.kl_coef=0", "--reference_refresh=null"],
        },
    ),
    "staleness": Study(
        title="Staleness, and what the ratio is taken over",
        claim="a ratio that ignores who sampled fails as the lag grows; decoupling mends it (AReaL's table, its shape)",
        baseline="v = 1, π/α, centre one",
        arms={f"v = {v or '∞'}, {name}": [period(v), *own] for v in (1, 5, 20, None) for name, own in RATIOS.items()},
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
}


def run(study: str, arm: str, seed: int) -> dict[str, Any]:
    """One run, in this process."""
    import torch

    from lgrpo.cli import LGRPOCLI, quiet_lightning
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
    }


def work(job: tuple[str, str, int]) -> dict[str, Any]:
    try:
        return run(*job)
    except Exception as error:
        own = dict(zip(("study", "arm", "seed"), job, strict=True))
        return own | {"error": f"{type(error).__name__}: {error}"[:300]}


def read() -> list[dict[str, Any]]:
    return [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []


def planned(names: list[str], seeds: int) -> Iterator[tuple[str, str, int]]:
    """Seed after seed, so that what is there after a while is a whole with fewer seeds."""
    done = {(row["study"], row["arm"], row["seed"]) for row in read() if "error" not in row}
    for seed in range(seeds):
        for name in names:
            for arm in STUDIES[name].arms:
                if (name, arm, seed) not in done:
                    yield name, arm, seed


def launch(names: list[str], seeds: int, workers: int) -> None:
    jobs = list(planned(names, seeds))
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    with multiprocessing.get_context("spawn").Pool(workers, maxtasksperchild=20) as pool:
        for count, row in enumerate(pool.imap_unordered(work, jobs), start=1):
            with ROWS.open("a") as file:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
            final = row.get("error") or row["pass@1"][-1]
            print(f"{count}/{len(jobs)} {row['study']}, {row['arm']}, seed {row['seed']}: {final}", flush=True)


def by_arm(study: str) -> dict[str, dict[int, dict[str, Any]]]:
    """Rows by arm and seed."""
    found: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    for row in read():
        if row["study"] == study and "error" not in row:
            found[row["arm"]][row["seed"]] = row
    return {arm: found[arm] for arm in STUDIES[study].arms if arm in found}


def table(study: str) -> str:
    """Final pass@1, its difference to the baseline seed by seed, and how steady the end was."""
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
    names = list(rows)[::-1]
    figure = Figure(figsize=(8, 0.28 * len(names) + 1.5), layout="constrained")
    axes = figure.add_subplot()
    start = statistics.fmean(row["pass@1"][0] for seeds in rows.values() for row in seeds.values())
    axes.axvline(start, color="black", linewidth=0.8, linestyle=":", label="start (mean)")
    for place, name in enumerate(names):
        values = [row["pass@1"][-1] for row in rows[name].values()]
        interval = mean_interval(values)
        axes.plot(values, [place] * len(values), "o", color="#9db7d5", markersize=3, label=None if place else "seeds")
        half = 0.0 if interval.count < 2 else interval.half_width
        label = None if place else "mean, 95%"
        axes.errorbar(interval.mean, place, xerr=half, fmt="o", color="#2a6fbb", markersize=5, capsize=3, label=label)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(-0.7, len(names) - 0.3)
    axes.set_xlabel("final pass@1")
    axes.grid(axis="x", alpha=0.3)
    figure.legend(fontsize=8, ncols=3, loc="outside upper center")
    figure.savefig(path, dpi=130)


VERDICTS = {
    "ablation": (
        "v = 10 matches v = 1, with a tenth of the syncs: holds, to 0.02. The mask changes neither pass@1 nor "
        "the spread by anything ten seeds would show, so that it stabilises does not show on this task (β is "
        "0.01, and no seed is unstable without it). Ten steps on each rollout end 0.21 lower after as many "
        "optimizer steps: slower, as the paper has it. But they have then seen a tenth of the completions; "
        "(1, 1) was at 0.50 after twice as many, so for each completion reuse is ahead here."
    ),
    "dull_groups": (
        "sampled again with other prompts, they end 0.08 higher (0.076 ± 0.022) and steadier (spread 0.056 against "
        "0.095). That is for each step: the completions counted are those trained on, and those thrown away come on "
        "top. The mask changes nothing that ten seeds would show."
    ),
    "deviation": (
        "no estimate is told apart from another at any G, 4 included: the bias of small groups costs nothing here. "
        "Fewer and larger groups (G = 16) end a little lower, at the edge of what these seeds show; a step has 128 "
        "completions in all rows."
    ),
    "refresh": (
        "a reference that never follows ends 0.03 lower (-0.029 ± 0.027). Once a stage, every ten rollouts and no "
        "reference at all are not told apart, so amplification by each refresh does not show beyond that."
    ),
    "staleness": (
        "without a ratio pass@1 falls with the lag (0.79, 0.75, 0.61 at v = 1, 5, 20), and π/α holds it (0.81, 0.83, "
        "0.77): the shape of AReaL's table. Offline it turns round: π/α clipped around one stops at 0.52, and "
        "stays nearest to α (0.29 nats), while no ratio reaches 0.75 and clips around π_k/α 0.77. No run collapsed. At "
        "one step on each rollout π/π_k and no ratio are one gradient, and so are eq. 6 and the decoupled loss: their "
        "rows are equal, seed by seed."
    ),
    "paper_b": (
        "importance sampling does not help: without it one-side (0.80 against 0.71) and ring (0.77 against 0.64) end "
        "higher at v = 20, and two-side is not told apart (0.45 against 0.50). Clips matter: REINFORCE has 0.51, "
        "one-side 0.80. A wide clip makes no difference at v = 20, and 0.2 offline (0.72 against 0.54). RED-Weight is "
        "0.06 behind GRPO at v = 20 and 0.24 ahead offline (0.76 against 0.53); RED-Drop is behind GRPO in both, so "
        "that RED beats GRPO holds for one of the two, offline. OPMD, at the settings of its file, "
        "collapses in every run."
    ),
}
"""What was seen, in words. They name figures, so they are written anew when seeds are added."""

INTRODUCTION = """# Results: the papers' comparisons at the scale we have

Made by `python -m tests.benchmarks.studies` from the rows it keeps in
[studies.jsonl](../../tests/benchmarks/results/studies.jsonl). Every run is `configs/tiny.yaml` (a model of 108 thousand
parameters learns to sort three digits, 200 optimizer steps, 128 completions in each) with the settings that
`tests/benchmarks/studies.py` names; pass@1 is of 128 held-out problems, 8 samples each. *Less baseline* is paired by
seed, and an interval that contains 0 means that these seeds do not tell the two apart. *Collapsed* counts seeds that
end below half of where they began, *spread* is the standard deviation of the rollouts' reward over the last quarter,
*largest KL* the most that the policy diverged from the one that sampled (`train/kl_behaviour`), the median of the
seeds. A completion has at most five tokens. *Seconds* are a run's, the median of its seeds, two at a time on two cores;
seeds were run on several days, beside other work on some, so they tell what a row costs, not which is faster.
All of it, 670 runs, takes about two and a half hours; it can be stopped at any time, and goes on where it was.

What such a small task can show is how the algorithms compare on it, not how they would at 7B. **No row here was run on
a GPU**; what was tried there is at the end.
"""

ON_A_GPU = """## On a GPU

*GSM8K* (`python -m tests.benchmarks.gsm8k --model SmolLM2-135M-Instruct --data GSM8K --rollouts 36`): the model learns
GSM8K's training solutions first (three epochs, a minute), then three arms train it by the settings of
`configs/papers/a_gsm8k.yaml` but for those the script lists, 36 rollouts of 28 × 16 completions each, six runs at a
time on one H200 in eight minutes. The command was stopped once before it had written a row, and went on; the rows are
read from the runs' folders, without their seconds. Pass@1 is over GSM8K's whole test set, four samples a problem at
temperature 0.7; it was 0.053 before:

{gsm8k}

**Nothing can be told apart.** Pass@1 ends between 0.049 and 0.064; 1,319 problems leave ± 0.008 to chance (twice the
standard error), and the two seeds of an arm are up to 0.011 apart. Whether the mask stabilises, or v = 10 matches
v = 1, is not answered at this size: a model of 135M solves one problem in seventeen, in six groups of ten all rewards
are equal, and 36 steps are few. With four syncs instead of 36 (kl_behaviour at most 0.010 instead of 0.003) there is
no harm that shows. An earlier day's runs, before a mistake in vLLM's random numbers was found, ended between 0.052 and
0.063. Not run on a GPU: (10, 1) without the mask, (1, 10), more seeds, the other studies.

*Throughput of v* (Mroueh et al.: v = 10 has 1.35 times the rollouts of v = 1, at 7B with one GPU that serves and seven
that train). On one GPU engine and trainer take turns, and v saves syncs, sleeping and waking, and the ends of calls
("of 320": that each engine decodes 320 completions at a time):

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

So v = 10 has 1.04 to 1.20 times the rollouts of v = 1 at 1.5B (and none more on the day when the engines had room for
one of them only), with realistic lengths 1.10 to 1.36 times, and 1.29 times at 7B with LoRA (8.5 against 6.6 a minute;
one rollout at v = 1, one cycle at v = 10). At 7B, of the 2.0 s that a rollout saves 1.1 are one long generation
instead of ten short ones, in which the engine is never half empty (22,200 tokens a second instead of 12,900), and 0.9
are syncs, sleeping and waking, with 14.7 GiB to the host and back; the update is the same. That is near the paper's
1.35, but not for its reason: there servers sample while others train. [The simulation](simulation.md) says how much
to expect of that, and what it assumes.
"""


def page() -> str:
    """What there is, study by study."""
    parts = [INTRODUCTION]
    for name, study in STUDIES.items():
        parts.append(f"## {study.title}\n\nThe claim: {study.claim}.")
        if not by_arm(name):
            parts.append(f"Not run yet: `python -m tests.benchmarks.studies {name}`.")
            continue
        picture = f"../../tests/benchmarks/results/study_{name}.png"
        parts += [f"![{study.title}]({picture})", table(name)]
        if name in VERDICTS:
            parts.append(f"**Here:** {VERDICTS[name]}")
    return "\n\n".join([*parts, ON_A_GPU.format(gsm8k=gsm8k.table())])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="*", help=f"which: {', '.join(STUDIES)}; by default all")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--workers", type=int, default=2, help="runs at a time, a thread each")
    parser.add_argument("--report", action="store_true", help="run nothing")
    options = parser.parse_args()
    if unknown := set(options.studies) - set(STUDIES):
        parser.error(f"there is no study {', '.join(sorted(unknown))}: there are {', '.join(STUDIES)}")
    names = options.studies or list(STUDIES)
    if not options.report:
        launch(names, options.seeds, options.workers)
    for name in names:
        if by_arm(name):
            draw(name, RESULTS / f"study_{name}.png")
            print(f"\n{STUDIES[name].title}\n\n{table(name)}")
    PAGE.write_text(page(), encoding="utf-8")
    if failed := [row for row in read() if "error" in row]:
        print(f"\n{len(failed)} runs failed:", *failed, sep="\n")


if __name__ == "__main__":
    main()
