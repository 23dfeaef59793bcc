"""Time the stages of a run with vLLM in process: ``python -m tests.benchmarks.vllm_stages``.

Random weights of a Qwen2 shape, with the module, data module and callbacks of any run. The first rollout is left out as
warm-up; whole cycles of v rollouts follow. Results are in ``results/vllm_stages-….json``.

    python -m tests.benchmarks.vllm_stages --v 1 10                                        # 1.5B, 448 × 512 tokens
    python -m tests.benchmarks.vllm_stages --strategy fsdp                                 # or fsdp2; world size 1
    python -m tests.benchmarks.vllm_stages --shape 7b --lora 16 --checkpointing --v 1 10 --prompts 8 --micro-batches 16
"""

from __future__ import annotations

import argparse
import cProfile
import json
import platform
import pstats
import random
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy

from lgrpo import CausalPolicy, ClippedLoss, GRPOModule, LoRA, RolloutDataModule, Sampling
from lgrpo.engines import VLLMEngine
from lgrpo.tasks import DatasetTask
from tests.benchmarks.parity_reward import Parity
from tests.benchmarks.stages import bare_trainer, peak_memory, reset_peak_memory
from tests.benchmarks.systems import Cycles
from tests.benchmarks.workload import SHAPES, prescribe_vllm
from tests.helpers import Logged

RESULTS = Path(__file__).parent / "results"
STAGES = ("sync", "generate", "score", "update", "wait")


class ResetPeakMemory(L.Callback):
    """Starts the measurement of peak memory after the first step."""

    has_begun = False

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 1 and not self.has_begun:
            self.has_begun = True
            reset_peak_memory()


class Kernels(L.Callback):
    """Profiles the GPU during four micro-batches of the second step."""

    def __init__(self, path: Path) -> None:
        self.path = path
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        self.profiler = torch.profiler.profile(activities=activities)

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == trainer.accumulate_grad_batches + 2:
            self.profiler.start()
        if batch_idx == trainer.accumulate_grad_batches + 6:
            self.profiler.stop()
            times = self.profiler.key_averages()
            self.path.write_text(times.table(sort_by="self_cuda_time_total", row_limit=45, max_name_column_width=90))


def run(module: GRPOModule, engine: VLLMEngine, v: int, options: argparse.Namespace, warm_up: int) -> dict[str, Any]:
    words, cycles = random.Random(0), -(-options.rollouts // v)
    rollouts = warm_up + cycles * v
    rows = [
        {"question": "".join(words.choice("0123456789") for _ in range(options.prompt_tokens))}
        for _ in range(rollouts * options.prompts)
    ]
    data = RolloutDataModule(
        DatasetTask(Parity(), train=rows),
        engine,
        num_prompts=options.prompts,
        group_size=options.group,
        num_rollouts=rollouts,
        sampling=Sampling(max_tokens=options.completion_tokens),
        generate_ahead=v > 1,
        seed=v,
    )
    seen, cuda = Logged(), torch.cuda.is_available()
    profilers = [Kernels(options.kernels)] if options.kernels else []
    strategies: dict[str, Any] = {
        "one": "auto",
        "fsdp": FSDPStrategy(),
        "fsdp2": ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1),
    }
    callbacks = [Cycles(warm_up * [1] + cycles * [v]), *([ResetPeakMemory()] if warm_up else []), seen, *profilers]
    trainer = bare_trainer(cuda, options.micro_batches, callbacks, strategy=strategies[options.strategy])
    synced = len(engine.state.ledger)
    reset_peak_memory()
    trainer.fit(module, datamodule=data)
    kept = seen.rows[warm_up:]
    mean = {name: sum(row.get(f"time/{name}", 0.0) for row in kept) / len(kept) for name in STAGES}
    span = mean["wait"] + mean["update"]
    sampled = options.completion_tokens * options.prompts * options.group
    trained = sampled + options.prompts * options.group * options.prompt_tokens
    result = {
        "v": v,
        "rollouts": len(kept),
        "step_seconds": span,
        "steps": [row["time/wait"] + row["time/update"] for row in kept],
        **{f"{name}_seconds": value for name, value in mean.items()},
        "generate_tokens_per_second": sampled / mean["generate"],
        "update_tokens_per_second": trained / mean["update"],
        "rollouts_per_minute": 60 / span,
        "sync_bytes": engine.state.ledger[-1].num_bytes,
        "sync_seconds_each": [record.seconds for record in engine.state.ledger[synced:]][-3:],
        "engine_mismatch_mean": seen.rows[0].get("train/engine_mismatch_mean"),
        "lags": [row["train/lag"] for row in seen.rows],
        "peak_gib": peak_memory() / 2**30,
    }
    if cuda:
        result["peak_allocated_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1.5b")
    parser.add_argument("--lora", type=int, help="rank of LoRA adapters on a frozen bfloat16 model")
    parser.add_argument(
        "--strategy", choices=["one", "fsdp", "fsdp2"], default="one", help="strategy of Lightning, with world size 1"
    )
    parser.add_argument("--v", type=int, nargs="+", default=[1])
    parser.add_argument("--prompts", type=int, default=28)
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=100)
    parser.add_argument("--completion-tokens", type=int, default=512)
    parser.add_argument("--micro-batches", type=int, default=28)
    parser.add_argument(
        "--rollouts", type=int, default=3, help="minimum number of rollouts after the first, in whole cycles"
    )
    parser.add_argument("--engine-memory", type=float, default=0.15, help="share of the GPU's memory for vLLM")
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    parser.add_argument("--activation-memory", type=float, default=0.8, help="policy.activation_memory")
    parser.add_argument("--profile", type=Path, help="path for a profile of Python in the last run")
    parser.add_argument("--kernels", type=Path, help="path for a profile of the GPU in an update")
    parser.add_argument("--out", type=Path, help="path of the results; by default in tests/benchmarks/results")
    options = parser.parse_args()

    cuda = torch.cuda.is_available()
    longest = options.prompt_tokens + options.completion_tokens
    policy = CausalPolicy(
        config={"model_type": "qwen2", "max_position_embeddings": longest, "tie_word_embeddings": options.shape != "7b"}
        | SHAPES[options.shape],
        characters="0123456789",
        gradient_checkpointing=options.checkpointing,
        compile=options.compile,
        activation_memory=options.activation_memory,
        chunk_size=4096,
        dtype="bfloat16" if options.lora and cuda else "float32",
        lora=LoRA(rank=options.lora) if options.lora else None,
    )
    module = GRPOModule(policy, ClippedLoss(), lambda p: torch.optim.AdamW(p, lr=1e-6, fused=cuda))
    engine = VLLMEngine(
        dtype="bfloat16" if cuda else None, max_model_len=longest, gpu_memory_utilization=options.engine_memory
    )
    prescribe_vllm([options.completion_tokens] * 10**6)
    kind = [
        options.shape,
        *(["lora"] if options.lora else []),
        *([options.strategy] if options.strategy != "one" else []),
    ]
    out = options.out or RESULTS / f"vllm_stages-{'-'.join(kind)}.json"
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if cuda else f"{platform.machine()} CPU",
        "torch": torch.__version__,
        "vllm": __import__("vllm").__version__,
        "settings": {k: v for k, v in vars(options).items() if k not in ("out", "v", "profile", "kernels")},
        "runs": [],
    }
    profile = cProfile.Profile()
    for number, v in enumerate(options.v, start=1):
        if options.profile and number == len(options.v):
            profile.enable()
        found = run(module, engine, v, options, warm_up=1 if number == 1 else 0)
        profile.disable()
        results["runs"].append(found)
        out.write_text(json.dumps(results, indent=1) + "\n")
        print(json.dumps(found, indent=1), flush=True)
    if options.profile:
        with options.profile.open("w") as file:
            statistics = pstats.Stats(profile, stream=file)
            statistics.sort_stats("tottime").print_stats(60)
            statistics.sort_stats("cumulative").print_stats(90)
    engine.close()


if __name__ == "__main__":
    main()
