"""Train a real 1.5B model on GSM8K with several arms of v, clip, method and learning rate, on one GPU.

    python -m tests.benchmarks.real_model --model FOLDER --data GSM8K --folder runs/real_model    # resumable
    python -m tests.benchmarks.real_model --model FOLDER --data GSM8K --groups lr --seconds 400
    python -m tests.benchmarks.real_model --report                                 # table and picture of all rows

``--model`` is a Hugging Face folder (Qwen2.5-Coder-1.5B-Instruct in the published rows), ``--data`` a folder with the
train and test files of GSM8K. Each run is one ``lgrpo fit`` with ``CONFIGS``, ``SETTINGS`` and the configs and settings
of its arm. The runs are done one after the other in one process, which keeps the engine and compiled code
(``lgrpo sweep --share-engines``). Each appends a row to ``tests/benchmarks/results/real_model.jsonl`` as soon as it
ends, so an interrupted command continues with the runs that have no row. With ``--workers`` above 1 the runs share the
GPU, and their seconds are not comparable.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from lgrpo.sweep.workers import Runner, SharedWorkers

ROOT = Path(__file__).parents[2]
ROWS = Path(__file__).parent / "results" / "real_model.jsonl"
CONFIGS = ("papers/a_gsm8k.yaml", "fast.yaml", "mask.yaml")
SETTINGS = {
    "data.sampling.temperature": 1.0,
    "data.sampling.max_tokens": 320,
    "data.engine.init_args.engine.init_args.max_model_len": 640,
    "data.evaluation.num_problems": 500,
    "data.evaluation.num_samples": 2,
    "data.evaluation.sampling.temperature": 1.0,
    "data.evaluation.sampling.max_tokens": 320,
    "model.optimizer.init_args.lr": 3e-6,
    "reference_refresh": "null",
    "validate_every": "lgrpo.ValidateEvery",
    "validate_every.rollouts": 10,
    "trainer.max_epochs": 1,
    "trainer.enable_progress_bar": "false",
    "trainer.enable_checkpointing": "false",
}
"""Changes to the configs that all arms share."""


class Arm(NamedTuple):
    """Configs and settings that an arm adds to those of all arms."""

    settings: dict[str, Any]
    configs: tuple[str, ...] = ()


CLIPS = {
    "": {},
    ", clip 0.6/2.0": {"model.loss.init_args.clip_low": 0.6, "model.loss.init_args.clip_high": 2.0},
    ", no clip": {"model.loss.init_args.clip_low": 1.0, "model.loss.init_args.clip_high": 1e6},
}
"""Half-widths of the clip by the ending of an arm's name; 0.2 if not named."""
METHODS = {
    "RED-Drop": "red_drop",
    "RED-Weight": "red_weight",
    "AsymRE": "asymre",
    "OPMD": "opmd",
    "REC one-side IS": "rec_oneside_is",
    "REC one-side": "rec_oneside_nois",
    "decoupled PPO": "decoupled_ppo",
    "M2PO": "m2po",
    "TIS": "tis_grpo",
    "GSPO": "gspo",
    "CISPO": "cispo",
}
"""Files of configs/algorithms by the name of the method."""
LEARNING_RATES = ("1e-6", "3e-6", "1e-5")
HELD_OUT = {
    "data.task.init_args.num_held_out": 200,
    "data.evaluation.num_problems": 200,
    "data.evaluation.num_samples": 4,
}
"""Settings that evaluate on problems held out of the training split, to choose a learning rate."""


def clip_arm(v: int, clip: str) -> Arm:
    """Return GRPO with a sync period and a clip."""
    return Arm({"weight_sync.period": v, "model.loss.init_args.kl_coef": 0.0} | CLIPS[clip])


def with_rate(arm: Arm, rate: str, **settings: Any) -> Arm:
    """Return an arm with another learning rate and further settings."""
    return arm._replace(settings=arm.settings | {"model.optimizer.init_args.lr": rate} | settings)


PERIODS = {f"v={v}{clip}": clip_arm(v, clip) for clip in CLIPS for v in (1, 2, 5, 10, 30)}
AT_TEN = {
    f"v=10, {name}": Arm({"weight_sync.period": 10}, (f"algorithms/{file}.yaml",)) for name, file in METHODS.items()
}
TUNED = {f"v={v}{clip}": clip_arm(v, clip) for clip in CLIPS for v in (1, 10)} | AT_TEN
"""Arms whose learning rate is tuned."""
GROUPS: dict[str, dict[str, Arm]] = {
    "v": PERIODS,
    "methods": AT_TEN,
    "lr": {
        f"{name}, lr {rate}": with_rate(arm, rate, **HELD_OUT) for name, arm in TUNED.items() for rate in LEARNING_RATES
    },
    "tuned": {
        f"{name} at {rate}": with_rate(arm, rate)
        for name, arm in (PERIODS | AT_TEN).items()
        for rate in LEARNING_RATES
        if float(rate) != SETTINGS["model.optimizer.init_args.lr"]
    },
}
"""Arms by group: sync periods and clips; methods at v = 10; learning rates, evaluated on held-out problems; the arms of
the first two groups with the learning rates that they do not have, evaluated on the test problems as these."""
ARMS = {name: arm for arms in GROUPS.values() for name, arm in arms.items()}
SIDES = ("low", "high")
BASELINE, NUM_SEEDS = "v=1", 3
LAST = 10
"""Rollouts at the end over which rewards are averaged."""

SECTION = """## A real model: how far may the sampler lag behind?

Qwen2.5-Coder-1.5B-Instruct learns GSM8K with `configs/papers/a_gsm8k.yaml`, `fast.yaml`, `mask.yaml` and the changes
listed in [real_model.py](../../tests/benchmarks/real_model.py): {rollouts} rollouts of 28 × 16 completions, an
optimizer step on each, learning rate 3e-6, no KL term. Before training pass@1 is {before} (500 test problems, two
samples each, temperature 1). The clip is 0.2 unless named. All runs used one H200.

![pass@1 against steps for each arm](../../tests/benchmarks/results/study_real_model.png)

{table}

*less v=1* is the difference to v = 1 with the same seed; its interval contains the error of evaluating 500 problems,
and not the variation between seeds. {seeds}; arms with fewer are no verdict, and {tuning}. Rows: {link}.

{verdicts}"""
LINK = "[real_model.jsonl](../../tests/benchmarks/results/real_model.jsonl)"


def arguments(options: argparse.Namespace, arm: str, seed: int, run: Path) -> list[str]:
    """Return the arguments of ``lgrpo fit`` for one run."""
    own = {
        "seed_everything": seed,
        "model.policy.name": options.model,
        "data.task.init_args.train": options.data,
        "data.num_rollouts": options.rollouts,
        "run": run,
    }
    given = [f"--config={ROOT / 'configs' / name}" for name in (*CONFIGS, *ARMS[arm].configs)]
    given += [f"--{name}={value}" for name, value in (SETTINGS | ARMS[arm].settings | own).items()]
    return [*given, *(f"--{setting}" for setting in options.set)]


def train(runner: Runner, options: argparse.Namespace, arm: str, seed: int) -> dict[str, Any] | None:
    """Train one arm and return its row; None if the study was stopped meanwhile."""
    name = "".join(c if c.isalnum() else "_" for c in arm)
    run = options.folder / f"{name}-{seed}-{time.time_ns()}"
    log = run.with_suffix(".log")
    start = time.perf_counter()
    status = runner.run(arguments(options, arm, seed, run), log)
    row = {"arm": arm, "seed": seed}
    if status is None:
        return None
    text = log.read_text(errors="replace")
    if status:
        return row | {"error": text[-1500:]}
    row |= measured(run) | setup(options) | {"seconds": round(time.perf_counter() - start, 1)}
    return row | {"kept_engine": "The engine of the previous run continues" in text}


def environment() -> dict[str, str]:
    """Return the environment of the runs."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": path()}


def path() -> str:
    """Return PYTHONPATH with this repository first, so that the runs import it."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def measured(run: Path) -> dict[str, Any]:
    """Return the metrics of a run that the study compares, per rollout or per validation."""
    from lgrpo.report import read_series

    series = read_series(run)
    names = {
        "reward": "rollout/reward",
        "truncated_fraction": "rollout/truncated_fraction",
        "zero_variance_fraction": "rollout/zero_variance_fraction",
        "completion_length": "rollout/completion_length",
        "kl_behaviour": "train/kl_behaviour",
        "engine_mismatch": "train/engine_mismatch_mean",
        "clip_fraction_low": "train/clip_fraction_low",
        "clip_fraction_high": "train/clip_fraction_high",
        "generate_seconds": "time/generate",
        "update_seconds": "time/update",
    }
    found: dict[str, Any] = {
        key: [float(f"{value:.4g}") for _, value in series[name]] for key, name in names.items() if name in series
    }
    found["pass@1"] = [[step, round(value, 4)] for step, value in series["val/pass@1"]]
    found["pass@1_stderr"] = round(series["val/pass@1_stderr"][-1][1], 4)
    return found


def setup(options: argparse.Namespace) -> dict[str, Any]:
    """Return what the numbers depend on beside the settings."""
    import torch
    import transformers

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {
        "model": Path(options.model).name,
        "rollouts": options.rollouts,
        "workers": options.workers,
        "set": options.set,
        "commit": options.commit,
        "device": device,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def read(path: Path | None = None) -> list[dict[str, Any]]:
    """Return the rows of runs that finished."""
    path = path or ROWS
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [row for row in rows if "error" not in row]


def launch(options: argparse.Namespace) -> None:
    """Train every arm and seed that has no row yet; start none after ``options.seconds``."""
    options.folder.mkdir(parents=True, exist_ok=True)
    options.rows.parent.mkdir(parents=True, exist_ok=True)
    done = {(row["arm"], row["seed"]) for row in [*read(), *read(options.rows)]}
    jobs = [(arm, seed) for seed in options.seeds for arm in options.arms if (arm, seed) not in done]
    deadline = time.monotonic() + options.seconds
    runner, writing = SharedWorkers(options.workers, environment()), threading.Lock()

    def train_one(arm: str, seed: int) -> None:
        if time.monotonic() > deadline or (row := train(runner, options, arm, seed)) is None:
            return
        with writing, options.rows.open("a") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
        print(row.get("error") or f"{arm}, seed {seed}: pass@1 {row['pass@1']}, {row['seconds']} s", flush=True)

    try:
        with ThreadPoolExecutor(options.workers) as pool:
            try:
                for future in [pool.submit(train_one, *job) for job in jobs]:
                    future.result()
            except BaseException:
                runner.stop()
                raise
    finally:
        runner.close()


def by_arm() -> dict[str, list[dict[str, Any]]]:
    """Return the rows of every arm that has some, by seed."""
    rows = sorted(read(), key=lambda row: row["seed"])
    return {arm: own for arm in ARMS if (own := [row for row in rows if row["arm"] == arm])}


def table() -> str:
    """Return the rows that were evaluated on the test problems as a Markdown table, one line per arm."""
    lines = [
        f"| arm | seeds | pass@1 | less {BASELINE} | reward, last {LAST} | clipped tokens | largest KL to α |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for arm, rows in by_arm().items():
        if arm in GROUPS["lr"]:
            continue
        after = ", ".join(f"{row['pass@1'][-1][1]:.3f}" for row in rows)
        reward = statistics.fmean(value for row in rows for value in row["reward"][-LAST:])
        clipped = sum(
            statistics.fmean(x for row in rows for x in row.get(f"clip_fraction_{side}", [0.0])) for side in SIDES
        )
        kl = max(value for row in rows for value in row["kl_behaviour"])
        cells = [arm, str(len(rows)), after, difference(rows), f"{reward:.3f}", f"{clipped:.2%}", f"{kl:.2g}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def difference(rows: list[dict[str, Any]]) -> str:
    """Return the final pass@1 of an arm less that of the baseline with the same seed, and the error of measuring it."""
    baseline = {row["seed"]: row for row in by_arm().get(BASELINE, [])}
    pairs = [(row, baseline[row["seed"]]) for row in rows if row["seed"] in baseline and row["arm"] != BASELINE]
    if not pairs:
        return ""
    mean = statistics.fmean(row["pass@1"][-1][1] - other["pass@1"][-1][1] for row, other in pairs)
    variance = sum(row["pass@1_stderr"] ** 2 + other["pass@1_stderr"] ** 2 for row, other in pairs) / len(pairs) ** 2
    return f"{mean:+.3f} ± {1.96 * variance**0.5:.3f}"


def verdicts(arms: dict[str, list[dict[str, Any]]]) -> str:
    """Return what the seeds of each complete arm say about its difference to the baseline."""
    from lgrpo.report.intervals import paired_difference

    final = {arm: {row["seed"]: row["pass@1"][-1][1] for row in rows} for arm, rows in arms.items()}
    others = [arm for arm in final if arm != BASELINE]
    if BASELINE not in final or not others:
        return f"No verdict yet: {BASELINE} and another arm need {NUM_SEEDS} seeds."
    lines = [
        f"Verdicts on final pass@1: the difference to {BASELINE}, paired by seed, with a t-interval over the seeds at "
        f"95 % after Bonferroni's correction for {len(others)} comparisons.",
        "",
    ]
    for arm in others:
        found = paired_difference(final[arm], final[BASELINE], 1 - 0.05 / len(others))
        assert found is not None
        side = "below" if found.mean < 0 else "above"
        is_clear = abs(found.mean) > found.half_width
        verdict = f"**{side} {BASELINE}**" if is_clear else f"these seeds do not separate it from {BASELINE}"
        lines.append(f"- {arm}: {found.mean:+.3f} ± {found.half_width:.3f}: {verdict}.")
    return "\n".join(lines)


def area(row: dict[str, Any]) -> float:
    """Return the mean of pass@1 over the steps of a run: the area under its curve."""
    points = row["pass@1"]
    pieces = [(x1 - x0) * (y0 + y1) / 2 for (x0, y0), (x1, y1) in itertools.pairwise(points)]
    return sum(pieces) / (points[-1][0] - points[0][0])


def best_rates() -> dict[str, str]:
    """Return the learning rate with the largest area under the curve of each arm for which all were tried."""
    found = by_arm()
    tried = {name: {rate: found.get(f"{name}, lr {rate}") for rate in LEARNING_RATES} for name in TUNED}
    return {
        name: max(rates, key=lambda rate: statistics.fmean(area(row) for row in rates[rate] or []))
        for name, rates in tried.items()
        if all(rates.values())
    }


def rate_table() -> str:
    """Return the areas under the curves of the learning rates as a Markdown table, one line per arm; empty if none."""
    found, best = by_arm(), best_rates()
    lines = [f"| arm | {' | '.join(LEARNING_RATES)} | best |", f"|---|{'---:|' * (len(LEARNING_RATES) + 1)}"]
    for name in TUNED:
        tried = [found.get(f"{name}, lr {rate}", []) for rate in LEARNING_RATES]
        if any(tried):
            areas = [f"{statistics.fmean(map(area, rows)):.3f}" if rows else "" for rows in tried]
            lines.append(f"| {' | '.join([name, *areas, best.get(name, '')])} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def tuning() -> str:
    """Return which learning rates were tuned, as the end of a sentence."""
    if not (rates := rate_table()):
        return "no learning rate was tuned for an arm\nyet"
    return (
        "learning rates were compared with one seed by the mean pass@1 of the run on 200 problems held out of the "
        f"training split:\n\n{rates}\n\nAn arm named *at* a rate was trained with that one"
    )


def section() -> str:
    """Return the section of the results page."""
    found = {arm: rows for arm, rows in by_arm().items() if arm not in GROUPS["lr"]}
    seeds = {arm: len(rows) for arm, rows in found.items()}
    complete = [arm for arm, count in seeds.items() if count >= NUM_SEEDS]
    rows = [row for rows in found.values() for row in rows]
    first, (length,) = rows[0], {row["rollouts"] for row in rows}
    return SECTION.format(
        rollouts=length,
        before=f"{first['pass@1'][0][1]:.3f}",
        table=table(),
        seeds=f"{len(complete)} of {len(seeds)} arms have {NUM_SEEDS} seeds",
        verdicts=verdicts({arm: found[arm] for arm in complete}),
        tuning=tuning(),
        link=LINK,
    )


def draw(path: Path) -> None:
    """Draw pass@1 against optimizer steps, a line per arm of v and clip: the mean over its seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    styles = dict(zip(CLIPS, ("-", "--", ":"), strict=True))
    colours = {v: f"C{number}" for number, v in enumerate((1, 2, 5, 10, 30))}
    for arm, rows in by_arm().items():
        if arm not in PERIODS:
            continue
        v, clip = arm.partition(",")[0], arm[len(arm.partition(",")[0]) :]
        steps = [step for step, _ in rows[0]["pass@1"]]
        means = [statistics.fmean(row["pass@1"][index][1] for row in rows) for index in range(len(steps))]
        label = f"{arm} ({len(rows)} seed{'s' * (len(rows) > 1)})"
        axes.plot(steps, means, styles[clip], color=colours[int(v[2:])], marker="o", markersize=3, label=label)
    axes.set(xlabel="optimizer steps", ylabel="pass@1, GSM8K test problems")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="upper left")
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="Hugging Face folder of the model.")
    parser.add_argument("--data", type=Path, help="Folder with the train and test files of GSM8K.")
    parser.add_argument("--folder", type=Path, default=Path("runs/real_model"), help="Folder for the runs and logs.")
    parser.add_argument(
        "--arms", nargs="+", choices=ARMS, metavar="ARM", default=["v=1", "v=10"], help="Arms to train."
    )
    parser.add_argument(
        "--groups", nargs="+", choices=GROUPS, default=[], help="Groups whose arms are trained instead of --arms."
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="Seeds of every arm.")
    parser.add_argument("--rollouts", type=int, default=30, help="Rollouts, and so optimizer steps, of a run.")
    parser.add_argument("--workers", type=int, default=1, help="Number of runs that share the GPU.")
    parser.add_argument("--seconds", type=float, default=math.inf, help="Seconds after which no further run starts.")
    parser.add_argument("--rows", type=Path, default=ROWS, help="File to append rows to; it is also read.")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="More settings of lgrpo fit.")
    parser.add_argument("--commit", default="", help="Commit to note in the rows.")
    parser.add_argument("--report", action="store_true", help="Print the table and train nothing.")
    options = parser.parse_args()
    options.arms = [arm for group in options.groups for arm in GROUPS[group]] or options.arms
    if not options.report:
        if options.model is None or options.data is None:
            parser.error("--model and --data are required to train")
        options.model, options.data, options.folder = (
            str(options.model.resolve()),
            str(options.data.resolve()),
            options.folder.resolve(),
        )
        launch(options)
    draw(ROWS.with_name("study_real_model.png"))
    print(table())


if __name__ == "__main__":
    main()
