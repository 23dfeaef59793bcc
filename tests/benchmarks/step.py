"""A whole step of GRPO, ours and a peer's, on one device: ``python -m tests.benchmarks.step``.

Both systems train the same model of random weights on the same prompts, with the same numbers of prompts, completions
and tokens, in the same precision: one process after the other, the first steps left out as warm-up. What a system
does with its memory and in what order is its own business; its settings are in the table.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

SHAPES = {
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12}
    | {"num_key_value_heads": 2, "vocab_size": 151936},
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
    | {"num_key_value_heads": 2, "vocab_size": 151936},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    | {"num_key_value_heads": 1, "vocab_size": 512},
}
CHARACTERS = "".join(map(chr, range(0x4E00, 0x4E00 + 400)))
PEAK = 790e12  # FLOP/s of an H200 in bfloat16


def make_model(folder: Path, shape: str, longest: int) -> int:
    """A folder with a model of random weights and a tokenizer for the prompts. The number of parameters."""
    from transformers import AutoModelForCausalLM, LlamaConfig  # qwen2 would load a tokenizer of its own making

    from lgrpo.policy import character_tokenizer

    torch.manual_seed(0)
    special = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    config = LlamaConfig(**SHAPES[shape], max_position_embeddings=longest, tie_word_embeddings=True, **special)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    character_tokenizer(CHARACTERS).save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def questions(options: argparse.Namespace) -> list[str]:
    """Prompts of equally many tokens."""
    draw = random.Random(1)
    return ["".join(draw.choices(CHARACTERS, k=options.prompt_tokens)) for _ in range(2048)]


def run_ours(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    import lightning as L

    from lgrpo import CausalPolicy, ClippedLoss, GRPOModule, RolloutDataModule, Sampling, WeightSync
    from lgrpo.engines import VLLMEngine
    from lgrpo.tasks import DatasetTask
    from tests.benchmarks.parity_reward import Parity
    from tests.helpers import Logged

    cuda = torch.cuda.is_available()
    policy = CausalPolicy(
        str(folder),
        gradient_checkpointing=options.checkpointing,
        compile=cuda and options.compile,
        chunk_size=4096,
    )
    module = GRPOModule(policy, ClippedLoss(), lambda p: torch.optim.AdamW(p, lr=1e-6))
    engine = VLLMEngine(
        dtype="bfloat16" if cuda else None,
        max_model_len=options.prompt_tokens + options.completion_tokens,
        gpu_memory_utilization=options.engine_memory,
    )
    data = RolloutDataModule(
        DatasetTask(Parity(), train=[{"question": text} for text in questions(options)]),
        engine,
        num_prompts=options.prompts,
        group_size=options.group,
        num_rollouts=options.warm_up + options.steps,
        sampling=Sampling(max_tokens=options.completion_tokens),
        generate_ahead=options.v > 1,
    )
    seen, clock = Logged(), Clock(options.warm_up)
    trainer = L.Trainer(
        accelerator="auto",
        devices=1,
        precision="bf16-mixed" if cuda else "32-true",
        max_epochs=1,
        accumulate_grad_batches=options.micro_batches,
        gradient_clip_val=1.0,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tempfile.mkdtemp(),
        callbacks=[WeightSync(options.v), seen, clock.for_lightning()],
    )
    trainer.fit(module, datamodule=data)
    kept = seen.rows[options.warm_up :]
    stages = ("sync", "generate", "score", "wait", "update")
    means = {name: sum(row.get(f"time/{name}", 0.0) for row in kept) / len(kept) for name in stages}
    tokens = sum(row["rollout/completion_length"] for row in kept) / len(kept) * options.prompts * options.group
    trained = tokens + options.prompts * options.group * options.prompt_tokens
    return clock.figures() | {
        "stages": means,
        "sync_each": [record.seconds for record in engine.ledger],
        "generate_tokens_per_second": tokens / means["generate"],
        "update_tokens_per_second": trained / means["update"],
        "update_mfu": 6 * sum(p.numel() for p in policy.parameters()) * trained / means["update"] / PEAK,
        "mean_length": tokens / options.prompts / options.group,
    }


def run_trl(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    cuda = torch.cuda.is_available()
    clock = Clock(options.warm_up)
    completions = options.prompts * options.group
    lengths: list[float] = []

    def parity(completion_ids: list[list[int]], **_: Any) -> list[float]:
        lengths.append(sum(map(len, completion_ids)) / len(completion_ids))
        return [float(sum(ids) % 2) for ids in completion_ids]

    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_vllm=cuda,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=options.engine_memory,
        vllm_enable_sleep_mode=cuda,
        per_device_train_batch_size=completions // options.micro_batches,
        gradient_accumulation_steps=options.micro_batches,
        num_generations=options.group,
        max_completion_length=options.completion_tokens,
        max_steps=options.warm_up + options.steps,
        learning_rate=1e-6,
        temperature=1.0,
        beta=0.0,
        bf16=cuda,
        gradient_checkpointing=options.checkpointing,
        optim="adamw_torch_fused",
        lr_scheduler_type="constant",
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        use_cpu=not cuda,
        model_init_kwargs={"dtype": "float32"},
        use_liger_kernel=options.liger,
    )
    trainer = GRPOTrainer(
        model=str(folder),
        reward_funcs=parity,
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": text} for text in questions(options)]),
        callbacks=[clock.for_transformers()],
    )
    trainer.train()
    return clock.figures() | {"mean_length": sum(lengths) / len(lengths)}


class Clock:
    """The time of the steps after the first few, and the most memory they took."""

    def __init__(self, warm_up: int) -> None:
        self.warm_up = warm_up
        self.times: list[float] = []

    def tick(self, step: int) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            if step == self.warm_up:
                torch.cuda.reset_peak_memory_stats()
        if step >= self.warm_up:
            self.times.append(time.perf_counter())

    def for_lightning(self) -> Any:
        import lightning as L

        tick = self.tick

        class OnStep(L.Callback):
            def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, i: int) -> None:
                if (i + 1) % trainer.accumulate_grad_batches == 0:
                    tick(trainer.global_step)

        return OnStep()

    def for_transformers(self) -> Any:
        from transformers import TrainerCallback

        tick = self.tick

        class OnStep(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                tick(state.global_step)

        return OnStep()

    def figures(self) -> dict[str, Any]:
        steps = [after - before for before, after in zip(self.times, self.times[1:], strict=False)]
        found: dict[str, Any] = {"step_seconds": sum(steps) / len(steps), "steps": steps}
        if torch.cuda.is_available():
            found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        return found


def measure(system: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One system in a process of its own."""
    out = Path(tempfile.mkdtemp()) / "figures.json"
    command = [sys.executable, "-m", "tests.benchmarks.step", *sys.argv[1:]]
    command += ["--inside", system, "--model", str(folder), "--out", str(out)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=options.limit)
    except subprocess.TimeoutExpired:
        return {"error": f"not finished after {options.limit:g} s"}
    if not out.exists():
        lines = [line for line in done.stderr.splitlines() if "Error" in line] or done.stderr.splitlines()
        return {"error": [line[:300] for line in lines[-3:]]}
    return json.loads(out.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1.5b")
    parser.add_argument("--prompts", type=int, default=28)
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=100)
    parser.add_argument("--completion-tokens", type=int, default=512)
    parser.add_argument("--micro-batches", type=int, default=28)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--v", type=int, default=1)
    parser.add_argument("--engine-memory", type=float, default=0.4)
    parser.add_argument("--checkpointing", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--liger", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--systems", nargs="+", default=["lgrpo", "trl"])
    parser.add_argument("--limit", type=float, default=400, help="seconds for each system")
    parser.add_argument("--out", type=Path, default=Path("tests/benchmarks/results/step.json"))
    parser.add_argument("--inside", choices=["lgrpo", "trl"], help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        figures = {"lgrpo": run_ours, "trl": run_trl}[options.inside](options.model, options)
        options.out.write_text(json.dumps(figures))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parameters = make_model(folder, options.shape, options.prompt_tokens + options.completion_tokens)
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} CPU"
        results: dict[str, Any] = {"device": device, "torch": torch.__version__, "parameters": parameters}
        results["settings"] = {k: v for k, v in vars(options).items() if k not in ("out", "inside", "model")}
        for system in options.systems:
            results[system] = measure(system, folder, options)
            print(system, json.dumps(results[system]), flush=True)
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(results, indent=1, default=str))
    if all("step_seconds" in results.get(system, {}) for system in ("lgrpo", "trl")):
        print(f"ratio to TRL {results['trl']['step_seconds'] / results['lgrpo']['step_seconds']:.2f}")


if __name__ == "__main__":
    main()
