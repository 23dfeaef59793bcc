"""Train a real 1.5B model on GSM8K with several arms of v, clip, method and learning rate, on one GPU.

    python -m tests.benchmarks.real_model --model FOLDER --data GSM8K --folder runs/real_model    # resumable
    python -m tests.benchmarks.real_model --model FOLDER --data GSM8K --groups lr --seconds 400
    python -m tests.benchmarks.real_model --model FOLDER --data GSM8K --math500 MATH500 --groups longer --seconds 450
    python -m tests.benchmarks.real_model --report                                 # table and picture of all rows

``--model`` is a Hugging Face folder (Qwen2.5-Coder-1.5B-Instruct in the published rows), ``--data`` a folder with the
train and test files of GSM8K. Each run is one ``lgrpo fit`` with ``CONFIGS``, ``SETTINGS`` and the configs and settings
of its arm. The runs are done one after the other in one process, which keeps the engine and compiled code
(``lgrpo sweep --share-engines``). Each appends a row to ``tests/benchmarks/results/real_model.jsonl`` as soon as it
ends, so an interrupted command continues with the runs that have no row. A run of the group ``longer`` writes a
checkpoint after ``--seconds`` and ends; the next command with the same ``--folder`` continues it. With ``--workers``
above 1 the runs share the GPU, and their seconds are not comparable.

``--arms v=1 "v=1, RL teacher" "v=10, RL teacher" --teacher FOLDER`` trains v = 1, then distils its final policy into
the model as it was before, at two sync periods.

At its end a run also evaluates its policy with a higher limit of tokens, and on MATH-500 if ``--math500`` names its
folder (``tests.benchmarks.held_out``). The model before training is a row of its own, ``INITIAL``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from lgrpo.sweep.workers import Runner, SharedWorkers
from tests.benchmarks import trl_arm
from tests.benchmarks.held_out import judged

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
    "model.policy.share_prompts": "false",  # as in the first rows, so that seconds compare
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
    rollouts: int | None = None
    """Rollouts of a run that writes checkpoints, so that several commands can share it; by default those of the
    command, without checkpoints."""


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
    "DPPO": "dppo_tv",
    "SAPO": "sapo",
    "VESPO": "vespo",
}
"""Files of configs/algorithms by the name of the method."""
TOOL = Arm(
    {
        "weight_sync.period": 1,
        "model.loss.init_args.kl_coef": 0.0,
        "data.engine.init_args.engine.init_args.max_model_len": None,
        "data.sampling.max_tokens": None,
        "data.evaluation.sampling.max_tokens": None,
    },
    ("python_tool.yaml",),
)
"""v=1 with a Python tool; limits of tokens are those of its config."""
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
INITIAL, TRL = "before training", "TRL"
RL_TEACHER = "RL teacher"
"""Ending of arms that learn from ``--teacher`` and see no rewards."""
KL = {"model.loss.init_args.kl_coef": 0.1}
"""The KL term of paper A, to the model before training."""
LENGTH = 200
LONGER = {f"{name}, {LENGTH} steps": arm._replace(rollouts=LENGTH) for name, arm in TUNED.items()} | {
    f"{name} at {rate}, {LENGTH} steps": with_rate(arm, rate)._replace(rollouts=LENGTH)
    for name, arm in TUNED.items()
    for rate in LEARNING_RATES
    if float(rate) != SETTINGS["model.optimizer.init_args.lr"]
}
"""Arms that may be trained for longer; ``--groups longer`` trains those that ``best_of_each`` chooses."""
KEPT = {
    "trainer.enable_checkpointing": "true",
    "checkpoint.save_top_k": 0,
    "checkpoint.every_n_train_steps": 50,
}
"""Settings of a run that continues in the next command: only ``last.ckpt`` is kept."""
GROUPS: dict[str, dict[str, Arm]] = {
    INITIAL: {INITIAL: Arm({"model.optimizer.init_args.lr": 0.0, "model.loss.init_args.kl_coef": 0.0})},
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
    "adaptive": {
        f"adaptive v{clip}": Arm({"model.loss.init_args.kl_coef": 0.0} | CLIPS[clip], ("adaptive.yaml",))
        for clip in CLIPS
    },
    "mask": {
        "v=1, KL, no mask": Arm({"weight_sync.period": 1, "zero_variance_mask": "null"} | KL),
        "v=1, KL, mask": Arm({"weight_sync.period": 1} | KL),
    },
    "i": {
        "v=1, i=4": Arm({"weight_sync.period": 1, "data.reuse": 4, "model.loss.init_args.kl_coef": 0.0}),
        "v=4": clip_arm(4, ""),
    },
    "tool": {"v=1, Python tool": TOOL},
    "distillation": {f"v={v}, {RL_TEACHER}": Arm({"weight_sync.period": v}, ("distil.yaml",)) for v in (1, 10)},
    "longer": LONGER,
    "trl": {TRL: clip_arm(1, "")},
}
"""Arms by group: the model before training, one step with learning rate 0; sync periods and clips; methods at v = 10;
learning rates, evaluated on held-out problems; the arms of these two groups with the learning rates that they do not
have, evaluated on the test problems as these; v that adapts to the divergence; the mask of groups whose rewards are all
equal, with a KL term; four steps on a rollout, and four rollouts between syncs, with as many completions as v=1; a
Python tool; a teacher instead of rewards; more steps; TRL with the settings of v=1."""
ARMS = {name: arm for arms in GROUPS.values() for name, arm in arms.items()}
BASELINE, NUM_SEEDS = "v=1", 3
STAGES = ("time/sync", "time/generate", "time/score", "time/update")
"""Metrics whose sum is the time of training, without validation."""
SECONDS = "study_seconds.txt"
"""File of a run folder with the seconds of the commands that have trained it."""


def arguments(options: argparse.Namespace, arm: str, seed: int, run: Path) -> list[str]:
    """Return the arguments of ``lgrpo fit`` for one run."""
    own = {
        "seed_everything": seed,
        "model.policy.name": options.model,
        f"data.task.init_args.{'source.init_args.' if arm in GROUPS['tool'] else ''}train": options.data,
        "data.num_rollouts": num_rollouts(options, arm),
        "run": run,
    }
    chosen = ARMS[arm]
    if chosen.rollouts:
        own |= KEPT
    if arm == INITIAL:
        own |= {"validate_every.rollouts": 1}
    if arm in GROUPS["distillation"]:
        own |= {"model.loss.regularisers.teacher.name": options.teacher}
    given = [f"--config={ROOT / 'configs' / name}" for name in (*CONFIGS, *chosen.configs)]
    settings = SETTINGS | chosen.settings | own
    given += [f"--{name}={value}" for name, value in settings.items() if value is not None]
    if arm not in GROUPS["lr"]:
        given.append("--data.evaluation.results=jsonl")
    if arm not in GROUPS["lr"] | GROUPS["tool"]:
        given.append(f"--trainer.callbacks+={held_out(options)}")
    if arm == BASELINE and options.teacher is not None and not Path(options.teacher).exists():
        save = {"class_path": "tests.benchmarks.held_out.SaveModel", "init_args": {"folder": str(options.teacher)}}
        given.append(f"--trainer.callbacks+={json.dumps(save)}")
    if can_resume(run):
        given.append("--ckpt_path=last")
    return [*given, *(f"--{setting}" for setting in options.set)]


def num_rollouts(options: argparse.Namespace, arm: str) -> int:
    """Return the number of rollouts of a run."""
    return 1 if arm == INITIAL else ARMS[arm].rollouts or int(options.rollouts)


def held_out(options: argparse.Namespace) -> str:
    """Return the callback that evaluates the final policy, as an argument."""
    settings = {} if options.math500 is None else {"math500": options.math500}
    return json.dumps({"class_path": "tests.benchmarks.held_out.HeldOut", "init_args": settings})


def can_resume(run: Path) -> bool:
    """Return whether an earlier command left a checkpoint of a run."""
    return any(run.glob("checkpoints/last*.ckpt"))


def train(runner: Runner, options: argparse.Namespace, arm: str, seed: int) -> dict[str, Any] | None:
    """Train one arm and return its row; None if the study was stopped meanwhile."""
    if arm == TRL:
        return train_trl(runner, options, seed)
    name = "".join(c if c.isalnum() else "_" for c in arm)
    is_kept = ARMS[arm].rollouts is not None
    run = options.folder / (f"{name}-{seed}" if is_kept else f"{name}-{seed}-{time.time_ns()}")
    log = run.with_suffix(".log")
    earlier = seconds_before(run)
    if is_kept and run.exists() and not can_resume(run):
        shutil.rmtree(run)  # ended before its first checkpoint
    timer = threading.Timer(max(0.0, options.deadline - time.monotonic()), runner.stop)
    if is_kept and options.deadline < math.inf:
        timer.start()
    start = time.perf_counter()
    status = runner.run(arguments(options, arm, seed, run), log)
    timer.cancel()
    seconds = earlier + time.perf_counter() - start
    row = {"arm": arm, "seed": seed}
    if status is None:
        if can_resume(run):
            (run / SECONDS).write_text(str(seconds))
        return None
    text = log.read_text(errors="replace")
    if status:
        return row | {"error": text[-1500:]}
    row |= measured(run) | judged(run) | setup(options, arm) | {"seconds": round(seconds, 1)}
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    return row | {"kept_engine": "The engine of the previous run continues" in text}


def train_trl(runner: Runner, options: argparse.Namespace, seed: int) -> dict[str, Any] | None:
    """Train with TRL, evaluate the final weights as those of the other arms, and return the row.

    Weights of a finished training are kept until they have been evaluated, maybe by the next command.
    """
    run = options.folder / f"TRL-{seed}"
    run.mkdir(exist_ok=True)
    start = time.perf_counter()
    found = trl_arm.run(arguments(options, TRL, seed, run), run, limit=580)
    row: dict[str, Any] = {"arm": TRL, "seed": seed}
    if "error" in found:
        return row | found
    weights = {"class_path": "tests.benchmarks.held_out.LoadWeights", "init_args": {"folder": str(run / trl_arm.MODEL)}}
    evaluated = run / f"evaluated-{time.time_ns()}"
    given = [*arguments(options, INITIAL, seed, evaluated), f"--trainer.callbacks+={json.dumps(weights)}"]
    log = evaluated.with_suffix(".log")
    status = runner.run(given, log)
    if status is None:
        return None
    if status:
        return row | {"error": log.read_text(errors="replace")[-1500:]}
    before = [row["pass@1"][-1][1] for row in [*read(), *read(options.rows)] if row["arm"] == INITIAL]
    after = measured(evaluated)
    steps, seconds = len(found["step_seconds"]), sum(found["step_seconds"])
    row |= found | judged(evaluated) | setup(options, TRL) | {"pass@1_stderr": after["pass@1_stderr"]}
    row["pass@1"] = [*([0, value] for value in before[:1]), [steps, after["pass@1"][-1][1]]]
    row["seconds_at"] = [*(0.0 for _ in before[:1]), round(seconds, 1)]
    shutil.rmtree(run / trl_arm.MODEL)
    return row | {"seconds": round(time.perf_counter() - start, 1)}


def seconds_before(run: Path) -> float:
    """Return how long earlier commands have trained a run."""
    path = run / SECONDS
    return float(path.read_text()) if path.exists() else 0.0


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
        "turns": "rollout/turns",
        "model_errors": "rollout/model_errors",
        "kl_teacher": "train/kl_teacher",
        "environment_seconds": "time/environment",
        "generate_seconds": "time/generate",
        "update_seconds": "time/update",
    }
    found: dict[str, Any] = {
        key: [float(f"{value:.4g}") for _, value in series[name]] for key, name in names.items() if name in series
    }
    found["pass@1"] = [[step, round(value, 4)] for step, value in series["val/pass@1"]]
    spent = [point for name in STAGES for point in series.get(name, [])]
    found["seconds_at"] = [round(sum(value for at, value in spent if at < step), 1) for step, _ in series["val/pass@1"]]
    found["pass@1_stderr"] = round(series["val/pass@1_stderr"][-1][1], 4)
    return found


def setup(options: argparse.Namespace, arm: str) -> dict[str, Any]:
    """Return what the numbers depend on beside the settings."""
    import torch
    import transformers

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {
        "model": Path(options.model).name,
        "rollouts": num_rollouts(options, arm),
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
    rows = [row for row in [*read(), *read(options.rows)] if row["arm"] != INITIAL or has_all_sets(row, options)]
    done = {(row["arm"], row["seed"]) for row in rows}
    jobs = [(arm, seed) for seed in options.seeds for arm in options.arms if (arm, seed) not in done]
    if jobs and INITIAL not in {arm for arm, _ in [*done, *jobs]}:
        jobs.insert(0, (INITIAL, options.seeds[0]))
    options.deadline = time.monotonic() + options.seconds
    runner, writing = SharedWorkers(options.workers, environment()), threading.Lock()

    def train_one(arm: str, seed: int) -> None:
        if time.monotonic() > options.deadline:
            return
        if (row := train(runner, options, arm, seed)) is None:
            print(f"{arm}, seed {seed}: stopped; the next command continues it", flush=True)
            return
        with writing, options.rows.open("a") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
        print(row.get("error") or f"{arm}, seed {seed}: pass@1 {row['pass@1']}, {row['seconds']} s", flush=True)

    runner.for_each(jobs, lambda job: train_one(*job), options.workers)


def has_all_sets(row: dict[str, Any], options: argparse.Namespace) -> bool:
    """Return whether a row was evaluated on MATH-500 if this command does so."""
    return options.math500 is None or "math500" in row


def best_of_each(rows: list[dict[str, Any]]) -> list[str]:
    """Return the arms to train for longer: for v = 1 and v = 10 the one with the highest final pass@1.

    Arms with fewer seeds than a verdict needs are chosen only if no other has more.
    """
    final: dict[str, list[float]] = {}
    for row in rows:
        if f"{row['arm']}, {LENGTH} steps" in LONGER:
            final.setdefault(row["arm"], []).append(row["pass@1"][-1][1])
    chosen = []
    for v in (1, 10):
        own = {arm: values for arm, values in final.items() if arm.split(",")[0].split(" at ")[0] == f"v={v}"}
        best = max(own, key=lambda arm: (min(len(own[arm]), NUM_SEEDS), statistics.fmean(own[arm])), default=f"v={v}")
        chosen.append(f"{best}, {LENGTH} steps")
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="Hugging Face folder of the model.")
    parser.add_argument("--data", type=Path, help="Folder with the train and test files of GSM8K.")
    parser.add_argument("--math500", type=Path, help="Folder with the test file of MATH-500, to evaluate on it, too.")
    parser.add_argument(
        "--teacher",
        type=Path,
        help="Hugging Face folder of the teacher in the group distillation. If it does not exist, the next run of "
        f"{BASELINE} writes its final policy there.",
    )
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
    groups = GROUPS | {"longer": dict.fromkeys(best_of_each([*read(), *read(options.rows)]))}
    options.arms = [arm for group in options.groups for arm in groups[group]] or options.arms
    if not options.report:
        if options.model is None or options.data is None:
            parser.error("--model and --data are required to train")
        options.model, options.data, options.folder = (
            str(options.model.resolve()),
            str(options.data.resolve()),
            options.folder.resolve(),
        )
        options.math500 = options.math500 and str(options.math500.resolve())
        options.teacher = options.teacher and str(options.teacher.resolve())
        if options.teacher is None and set(options.arms) & set(GROUPS["distillation"]):
            parser.error("--teacher is required to distil")
        launch(options)
    from tests.benchmarks import real_model_report  # imports this module

    real_model_report.draw(ROWS.with_name("study_real_model.png"))
    print(real_model_report.table(real_model_report.main_arms()))


if __name__ == "__main__":
    main()
