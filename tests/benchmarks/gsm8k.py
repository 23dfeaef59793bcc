"""Run paper A's ablation on GSM8K with a small language model, on one GPU with vLLM in process.

    python -m tests.benchmarks.gsm8k --model SmolLM2 --data GSM8K --folder runs/gsm8k      # resumable
    python -m tests.benchmarks.gsm8k --model … --data … --folder … --workers 1             # one run at a time
    python -m tests.benchmarks.gsm8k --report                                              # table of all rows

``--model`` is a Hugging Face folder (SmolLM2-135M-Instruct), ``--data`` a folder with GSM8K's ``train`` and ``test``.
The model is first trained on GSM8K's training solutions with the answer appended, so that rewards vary; every run
starts from that model. Each run is ``lgrpo fit --config configs/papers/a_gsm8k.yaml`` with ``SETTINGS`` and appends a
row to ``tests/benchmarks/results/gsm8k.jsonl``. Rows of runs that shared the GPU have no meaningful seconds.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
ROWS = Path(__file__).parent / "results" / "gsm8k.jsonl"
OVERLAYS = {
    "(1, 1)": [],
    "(1, 1) + mask": ["configs/mask.yaml"],
    "(10, 1) + mask": ["configs/off_policy.yaml", "configs/mask.yaml"],
    "(10, 1)": ["configs/off_policy.yaml"],
    "(1, 10)": ["configs/papers/a_reuse.yaml"],
}
BASELINE = "(1, 1)"
ON_THE_GPU = ("(1, 1)", "(1, 1) + mask", "(10, 1) + mask")
SETTINGS = {
    "model.policy.gradient_checkpointing": False,
    "model.optimizer.init_args.lr": 3e-5,
    "data.task.init_args.template.prompt": "{question}\n",
    "data.task.init_args.template.chat": False,
    "data.sampling.temperature": 0.7,
    "data.generate_ahead": True,
    "data.evaluation.num_samples": 4,
    "data.evaluation.sampling.temperature": 0.7,
    "trainer.max_epochs": 3,
    "trainer.enable_progress_bar": False,
}
"""Changes to ``configs/papers/a_gsm8k.yaml``."""
ENGINE = {
    "data.engine.init_args.kv_cache_gib": 5,
    "data.engine.init_args.gpu_memory_utilization": 0.08,
    "data.engine.init_args.sleep_mode": False,
    "data.engine.init_args.dtype": "bfloat16",
    "data.engine.init_args.options": {
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [16, 64, 128, 256, 384, 512],
        }
    },
}
"""Settings for a GPU that several runs share, and for a quick start."""


def write_config(settings: dict[str, Any], path: Path) -> None:
    """Write settings, given by dotted names, as a file for ``--config``."""
    nested: dict[str, Any] = {}
    for name, value in settings.items():
        *parents, leaf = name.split(".")
        node = nested
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    path.write_text(yaml.safe_dump(nested))


def input_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings with the paths of the data and of the initial model."""
    return {"model.policy.name": str(options.folder / "warm"), "data.task.init_args.train": str(options.data)}


def teach(options: argparse.Namespace) -> None:
    """Train on the training solutions and save the model to ``folder/warm``."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    from lgrpo import CausalPolicy
    from lgrpo.tasks import GSM8K, Template

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    policy = CausalPolicy(str(options.model), pad_token=options.pad_token)
    policy.build()
    policy.to(device)
    template = Template(prompt=str(SETTINGS["data.task.init_args.template.prompt"]))
    rows = list(GSM8K(train=str(options.data), template=template).rows("train"))
    examples = []
    for row in rows:
        prompt = policy.tokenizer(template.prompt.format(**row)).input_ids
        answer = policy.tokenizer(f"{row['solution']}\nThe answer is {row['answer']}.").input_ids
        examples.append((prompt, [*answer, policy.tokenizer.eos_token_id]))
    total = max(1, int(options.epochs * len(examples) / options.batch))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=options.lr, weight_decay=0.0)
    start, order = time.perf_counter(), []
    for step in range(total):
        while len(order) < options.batch:
            order += torch.randperm(len(examples)).tolist()
        chosen, order = [examples[i] for i in order[: options.batch]], order[options.batch :]
        tokens = pad_sequence([torch.tensor(p + a) for p, a in chosen], batch_first=True)
        masks = [torch.tensor([False] * len(p) + [True] * len(a)) for p, a in chosen]
        mask = pad_sequence(masks, batch_first=True).to(device)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logprobs, _ = policy(tokens.to(device), mask, 1.0)
        loss = -logprobs.sum() / mask.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = options.lr * min(1, (step + 1) / 20) * (1 + math.cos(math.pi * step / total)) / 2
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == total - 1:
            print(f"supervised step {step + 1}/{total}: loss {loss.item():.3f}", flush=True)
    (options.folder / "warm").mkdir(parents=True, exist_ok=True)
    policy.model.save_pretrained(options.folder / "warm")
    policy.tokenizer.save_pretrained(options.folder / "warm")
    print(f"warm start: {time.perf_counter() - start:.0f} s")


def command(options: argparse.Namespace, arm: str, seed: int, run: Path) -> list[str]:
    settings = SETTINGS | (ENGINE if options.engine == "shared" else {}) | input_settings(options)
    settings |= {"seed_everything": seed, "data.num_rollouts": options.rollouts // 3}
    overlays = ["configs/papers/a_gsm8k.yaml", *OVERLAYS[arm]]
    first = seed == 0 and arm == BASELINE
    settings |= {"trainer.num_sanity_val_steps": -1 if first else 0, "trainer.check_val_every_n_epoch": 3}
    write_config(settings, run.with_suffix(".yaml"))
    given = [f"--config={overlay}" for overlay in [*overlays, run.with_suffix(".yaml")]]
    return [sys.executable, "-m", "lgrpo.cli", "fit", *given, *(f"--{one}" for one in options.set), f"--run={run}"]


def train(options: argparse.Namespace, arm: str, seed: int) -> dict[str, Any]:
    """Run one arm in a separate process and return its row."""
    name = "".join(c if c.isalnum() else "_" for c in arm)
    run, start = options.folder / f"{name}-{seed}", time.perf_counter()
    log = options.folder / f"{name}-{seed}.log"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // options.workers)))
    given = command(options, arm, seed, run)
    if any(run.glob("checkpoints/*")):
        given.append("--ckpt_path=last")
    with log.open("w") as file:
        done = subprocess.run(given, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)
    if done.returncode:
        return {"arm": arm, "seed": seed, "error": log.read_text()[-600:]}
    seconds = round(time.perf_counter() - start, 1)
    try:
        found = run_results(run)
    except Exception as error:  # the other runs continue
        found = {"error": f"{type(error).__name__}: {error}"}
    return {"arm": arm, "seed": seed} | found | {"workers": options.workers, "seconds": seconds}


def run_results(run: Path) -> dict[str, Any]:
    """Return the results of a run, read from its folder."""
    from lgrpo.report import read_series

    series = read_series(run)
    rewards = [value for _, value in series["rollout/reward"]]

    def mean(metric: str) -> float:
        return statistics.fmean([value for _, value in series.get(metric, [])[1:]] or [0.0])

    return {
        "pass@1": [round(value, 4) for _, value in series["val/pass@1"]],
        "reward": [round(value, 4) for value in rewards],
        "reward_spread_last_quarter": round(statistics.pstdev(rewards[-(len(rewards) // 4) :]), 4),
        "kl_behaviour_max": max((value for _, value in series.get("train/kl_behaviour", [])), default=0.0),
        "completion_length": [round(value, 1) for _, value in series["rollout/completion_length"]],
        "stages": {stage: mean(f"time/{stage}") for stage in ("sync", "generate", "wait", "update")},
        "syncs": len((run / "syncs.jsonl").read_text().splitlines()),
        "rollouts": len(rewards),
        "completions": len(rewards) * 448,
    }


def read() -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []
    return [row for row in rows if "error" not in row]


def launch(options: argparse.Namespace) -> None:
    options.folder.mkdir(parents=True, exist_ok=True)
    if not (options.folder / "warm" / "config.json").exists():
        teach(options)
    done = {(row["arm"], row["seed"]) for row in read()}
    jobs = [(arm, seed) for seed in range(options.seeds) for arm in options.arms if (arm, seed) not in done]
    with ThreadPoolExecutor(options.workers) as pool:
        for future in as_completed([pool.submit(train, options, *job) for job in jobs]):
            row = future.result()
            with ROWS.open("a") as file:  # immediately, so that an interrupt loses no row
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
            print({k: v for k, v in row.items() if k not in ("reward", "completion_length")}, flush=True)


def table() -> str:
    lines = [
        "| arm | seeds | pass@1 at the end, each seed | reward, last quarter | its spread | syncs |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for arm in OVERLAYS:
        if rows := [row for row in read() if row["arm"] == arm]:
            ends = ", ".join(f"{row['pass@1'][-1]:.3f}" for row in rows)
            last = statistics.fmean(statistics.fmean(row["reward"][-(len(row["reward"]) // 4) :]) for row in rows)
            spread = statistics.fmean(row["reward_spread_last_quarter"] for row in rows)
            lines.append(f"| {arm} | {len(rows)} | {ends} | {last:.3f} | {spread:.3f} | {rows[0]['syncs']} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="Hugging Face folder of the model")
    parser.add_argument("--pad-token", help="padding token for a tokenizer without one; it must occur in no text")
    parser.add_argument("--data", type=Path, help="folder with GSM8K's train and test files")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/gsm8k"), help="folder for the initial model and the runs"
    )
    parser.add_argument("--arms", nargs="+", choices=OVERLAYS, default=list(ON_THE_GPU))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--rollouts", type=int, default=45, help="rollouts of a run, in three epochs")
    parser.add_argument("--workers", type=int, default=6, help="parallel runs on the GPU")
    parser.add_argument("--engine", choices=["shared", "default"], default="shared", help="settings of vLLM")
    parser.add_argument("--epochs", type=float, default=3, help="epochs of the supervised phase")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--set", nargs="+", default=[], help="further settings of lgrpo fit, as NAME=VALUE")
    parser.add_argument("--report", action="store_true", help="print the table without running anything")
    options = parser.parse_args()
    if not options.report:
        if options.model is None or options.data is None:
            parser.error("--model and --data are required unless --report is given")
        options.folder, options.data = options.folder.resolve(), options.data.resolve()
        launch(options)
    print(table())


if __name__ == "__main__":
    main()
