"""Where the time of a run with vLLM in process goes, at v = 1 and v = 10: ``python -m tests.benchmarks.vllm_stages``.

Random weights of a Qwen2 shape, 28 prompts × 16 completions, 100 prompt and 512 completion tokens each, by the same
module, data module and callbacks as any run. The first rollout of each run is left out as warm-up.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
from pathlib import Path
from typing import Any

import lightning as L
import torch

from lgrpo import CausalPolicy, ClippedLoss, Evaluation, GRPOModule, RolloutDataModule, Sampling
from lgrpo.callbacks import WeightSync
from lgrpo.engines import VLLMEngine
from lgrpo.tasks import DatasetTask
from tests.benchmarks.parity_reward import Parity
from tests.benchmarks.step import SHAPES
from tests.helpers import Logged


def run(module: GRPOModule, engine: VLLMEngine, v: int, rollouts: int, options: argparse.Namespace) -> dict[str, Any]:
    words = random.Random(0)
    rows = [
        {"question": "".join(words.choice("0123456789") for _ in range(options.prompt_tokens))} for _ in range(4096)
    ]
    data = RolloutDataModule(
        DatasetTask(Parity(), train=rows, validation=rows[:8]),
        engine,
        num_prompts=options.prompts,
        group_size=options.group,
        num_rollouts=rollouts,
        sampling=Sampling(max_tokens=options.completion_tokens),
        evaluation=Evaluation(num_samples=1),
        generate_ahead=v > 1,
        seed=v,
    )
    seen = Logged()
    trainer = L.Trainer(
        accelerator="auto",
        devices=1,
        precision="bf16-mixed" if torch.cuda.is_available() else "32-true",
        max_epochs=1,
        accumulate_grad_batches=options.micro_batches,
        gradient_clip_val=1.0,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir="/tmp/lgrpo-bench",
        callbacks=[WeightSync(v), seen],
    )
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    trainer.fit(module, datamodule=data)
    kept = seen.rows[1:] if v == 1 else seen.rows
    mean = {
        name: sum(row.get(f"time/{name}", 0.0) for row in kept) / len(kept)
        for name in ("sync", "generate", "score", "update", "wait")
    }
    span = mean["wait"] + mean["update"]
    completions = options.prompts * options.group
    sampled = sum(row["rollout/completion_length"] for row in kept) / len(kept) * completions
    trained = sampled + completions * options.prompt_tokens
    figures = {
        "v": v,
        "rollouts": len(kept),
        "step_seconds": span,
        **{f"{name}_seconds": value for name, value in mean.items()},
        "generate_tokens_per_second": sampled / mean["generate"],
        "update_tokens_per_second": trained / mean["update"],
        "rollouts_per_minute": 60 / span,
        "sync_seconds_each": [record.seconds for record in engine.ledger][-2:],
        "engine_mismatch_mean": seen.rows[0].get("train/engine_mismatch_mean"),
        "lags": [row["train/lag"] for row in seen.rows],
    }
    if torch.cuda.is_available():
        figures["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="1.5b")
    parser.add_argument("--prompts", type=int, default=28)
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=100)
    parser.add_argument("--completion-tokens", type=int, default=512)
    parser.add_argument("--micro-batches", type=int, default=28)
    parser.add_argument("--rollouts", type=int, default=4, help="of the run at v = 1")
    parser.add_argument("--out", type=Path, default=Path("tests/benchmarks/results/vllm_stages.json"))
    options = parser.parse_args()

    cuda = torch.cuda.is_available()
    policy = CausalPolicy(
        config={"model_type": "qwen2", "max_position_embeddings": 1024, "tie_word_embeddings": True}
        | SHAPES[options.shape],
        characters="0123456789",
        gradient_checkpointing=cuda,
        chunk_size=4096,
    )
    module = GRPOModule(policy, ClippedLoss(), lambda p: torch.optim.AdamW(p, lr=1e-6))
    engine = VLLMEngine(
        dtype="bfloat16" if cuda else None, max_model_len=options.prompt_tokens + options.completion_tokens
    )
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if cuda else f"{platform.machine()} CPU",
        "torch": torch.__version__,
        "vllm": __import__("vllm").__version__,
        "settings": {k: v for k, v in vars(options).items() if k != "out"},
        "runs": [],
    }
    for v, rollouts in ((1, options.rollouts), (10, 10)):
        results["runs"].append(run(module, engine, v, rollouts, options))
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(results, indent=1))
        print(json.dumps(results["runs"][-1], indent=1), flush=True)
    one, ten = results["runs"]
    print(f"v = 10 over v = 1: {one['step_seconds'] / ten['step_seconds']:.2f}x rollouts per minute")
    engine.close()


if __name__ == "__main__":
    main()
