"""Measure what overlap saves on one GPU: seconds per rollout for several v, with and without ``data.overlap``.

    python -m tests.benchmarks.streaming --model FOLDER --data GSM8K      # all arms, one after the other
    python -m tests.benchmarks.streaming --report                         # table of all rows

One process starts the engines and compiles the policy once, and runs all arms with them. The learning rate is 0, so
that every arm samples from the same model and completions do not become shorter. The first cycle of an arm, or its
first two rollouts, is not counted. Rows are appended to ``tests/benchmarks/results/streaming.jsonl``; every run stays
in the file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch

from lgrpo import (
    CausalPolicy,
    ClippedLoss,
    GRPOModule,
    RolloutBatch,
    RolloutCallback,
    RolloutDataModule,
    Sampling,
    WeightSync,
)
from lgrpo.data.partial import PartialRollouts
from lgrpo.engines import EnginePool, RolloutEngine, VLLMEngine
from lgrpo.engines.processes import MPS_PRIORITY, TRAINER_PRIORITY
from lgrpo.run.resume import describe
from lgrpo.tasks import GSM8K, Template
from tests.benchmarks.stages import bare_trainer

ROWS = Path(__file__).parent / "results" / "streaming.jsonl"
BASELINE = "v=1"
HALF = PartialRollouts(extra_prompts=14)
ARMS: dict[str, dict[str, Any]] = {
    "v=1": {"v": 1},
    "v=10": {"v": 10, "generate_ahead": True},
    "v=10, overlap": {"v": 10, "generate_ahead": True, "overlap": True},
    "v=5": {"v": 5, "generate_ahead": True},
    "v=5, overlap": {"v": 5, "generate_ahead": True, "overlap": True},
    "v=2": {"v": 2, "generate_ahead": True},
    "v=2, overlap": {"v": 2, "generate_ahead": True, "overlap": True},
    "v=1, lead 1, overlap": {"v": 1, "lead": 1, "overlap": True},
    "v=1, lead 2, overlap": {"v": 1, "lead": 2, "overlap": True},
    "v=1, lead 2, in flight": {"v": 1, "lead": 2, "overlap": True, "in_flight": True},
    "v=1, partial": {"v": 1, "partial": True},
    "v=1, partial of half": {"v": 1, "partial": HALF},
    "v=10, overlap, partial": {"v": 10, "overlap": True, "partial": True},
}


class Clock(RolloutCallback):
    """Records when each rollout has been trained on, its tokens and its times."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.rollouts: list[dict[str, float]] = []

    def on_rollout_end(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: RolloutBatch) -> None:
        self.rollouts.append({"tokens": float(batch.completion_mask.sum()), "longest": float(batch.lengths.max())})

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, index: int) -> None:
        if (index + 1) % trainer.accumulate_grad_batches == 0:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.ends.append(time.perf_counter())
            metrics = trainer.datamodule.rollout.metrics  # type: ignore[attr-defined]
            self.rollouts[-1] |= {
                name.removeprefix("time/"): value for name, value in metrics.items() if name.startswith("time/")
            }
            self.rollouts[-1]["continued"] = metrics.get("rollout/continued_fraction", 0.0)


def measure(
    policy: CausalPolicy, engine: RolloutEngine, options: argparse.Namespace, arm: dict[str, Any]
) -> dict[str, Any]:
    """Train for some cycles, and return the seconds of each rollout after the first cycle."""
    v = arm["v"]
    settings = {name: value for name, value in arm.items() if name not in ("v", "in_flight")}
    skipped, lead = max(v, 2), arm.get("lead", 0)
    count = skipped + max(v, options.rollouts) // v * v + lead
    clock, sync = Clock(), WeightSync(v, arm.get("in_flight", False))
    module = GRPOModule(policy, ClippedLoss(), lambda p: torch.optim.AdamW(p, lr=0.0, fused=True))
    prompt = "{question}\n\nThink step by step, and end with the answer, a plain number."
    template = Template(prompt=prompt, chat=policy.tokenizer.chat_template is not None)
    data = RolloutDataModule(
        GSM8K(train=options.data, template=template),
        engine,
        num_prompts=options.prompts,
        group_size=options.group,
        num_rollouts=count,
        sampling=Sampling(max_tokens=options.max_tokens),
        **settings,
    )
    trainer = bare_trainer(torch.cuda.is_available(), options.micro_batches, [sync, clock])
    trainer.fit(module, datamodule=data)
    last = count - lead  # nothing is sampled any more while the last ones train
    ends, rollouts = clock.ends[:last], clock.rollouts[skipped:last]
    total = ends[-1] - ends[skipped - 1]

    def mean(name: str) -> float:
        return round(statistics.fmean(rollout[name] for rollout in rollouts), 4)

    return {
        "seconds_per_rollout": round(total / len(rollouts), 3),
        "seconds": [round(b - a, 3) for a, b in zip(ends[skipped - 1 :], ends[skipped:], strict=False)],
        "tokens_per_second": round(sum(rollout["tokens"] for rollout in rollouts) / total),
        "tokens": mean("tokens"),
        "generate": mean("generate"),
        "wait": mean("wait"),
        "sync": mean("sync"),
        "longest": mean("longest"),
        "continued": mean("continued"),
        "has_tail": False,
    }


def launch(options: argparse.Namespace) -> None:
    """Run the arms, and append a row for each as it ends."""
    os.environ.setdefault(MPS_PRIORITY, TRAINER_PRIORITY)
    cuda = torch.cuda.is_available()
    policy = CausalPolicy(options.model, compile=cuda, gradient_checkpointing=False, chunk_size=4096)
    engine = EnginePool(
        VLLMEngine(
            gpu_memory_utilization=0.2,
            kv_cache_gib=options.kv_cache_gib,
            max_num_seqs=options.max_num_seqs,
            max_model_len=options.max_model_len,
        ),
        options.processes,
    )
    names = ("prompts", "group", "max_tokens", "micro_batches", "processes", "kv_cache_gib", "max_num_seqs", "note")
    shared = {
        "model": Path(options.model).name,
        "settings": {name: getattr(options, name) for name in names},
        "commit": options.commit,
        "device": torch.cuda.get_device_name() if cuda else "CPU",
        "torch": torch.__version__,
    }
    for name in options.arms:
        start = time.perf_counter()
        arm = {key: describe(value) for key, value in ARMS[name].items()}
        row = {"arm": name, **arm, **measure(policy, engine, options, ARMS[name]), **shared}
        row["run_seconds"] = round(time.perf_counter() - start, 1)
        with options.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{name}: {row['seconds_per_rollout']} s per rollout, {row['tokens_per_second']} tokens/s", flush=True)


def command_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return what the rows of one command share."""
    return row["commit"], row["settings"], row["device"], row["model"]


def without_tail(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of a run with a lead without its last rollouts, which older rows count.

    Nothing is sampled while these train. The means of their times are not known without them.
    """
    if not (lead := row.get("lead", 0)) or row.get("has_tail") is False:
        return row
    seconds = statistics.fmean(row["seconds"][:-lead])
    means = {"seconds_per_rollout": seconds, "tokens_per_second": round(row["tokens"] / seconds)}
    return {name: value for name, value in row.items() if name not in ("wait", "generate")} | means


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table; ratios are to the baseline of the same command.

    The trainer is idle while it waits, engines while they do not generate, as shares of the whole time. The idle shares
    in older rows, means of the shares of single rollouts, are not used.
    """
    lines = [
        "| arm | s per rollout | ratio to v=1 | tokens/s | trainer idle | engines idle |",
        "|---|---|---|---|---|---|",
    ]
    for row in map(without_tail, rows):
        same = [r for r in rows if r["arm"] == BASELINE and command_of(r) == command_of(row)]
        ratio = row["seconds_per_rollout"] / statistics.median(r["seconds_per_rollout"] for r in same) if same else None
        cells = [
            row["arm"],
            f"{row['seconds_per_rollout']:.2f}",
            f"{ratio:.2f}" if ratio else "",
            f"{row['tokens_per_second']:,}",
            f"{row['wait'] / row['seconds_per_rollout']:.2f}" if "wait" in row else "",
            f"{1 - row['generate'] / row['seconds_per_rollout']:.2f}" if "generate" in row else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of the model")
    parser.add_argument("--data", help="folder of GSM8K")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM", help=", ".join(ARMS))
    parser.add_argument("--rollouts", type=int, default=10, help="rollouts that count, at least a cycle")
    parser.add_argument("--prompts", type=int, default=28)
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=320)
    parser.add_argument("--max-model-len", type=int, default=640)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--processes", type=int, default=2, help="engines")
    parser.add_argument("--max-num-seqs", type=int, default=512, help="completions that an engine decodes at a time")
    parser.add_argument("--kv-cache-gib", type=float, default=10.0, help="key-value cache of an engine")
    parser.add_argument("--commit", default="", help="commit of the code, for the row")
    parser.add_argument("--note", default="", help="anything else that differs, for the row")
    parser.add_argument("--out", type=Path, default=ROWS)
    parser.add_argument("--report", action="store_true", help="print the table of all rows")
    options = parser.parse_args(arguments)
    if options.report:
        print(table([json.loads(line) for line in options.out.read_text().splitlines()]))
    else:
        launch(options)


if __name__ == "__main__":
    main()
