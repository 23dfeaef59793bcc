"""Train on two CPU processes without and with the fast settings: ``python -m tests.processes.two_fast KIND FOLDER``.

KIND is ddp or fsdp2. The run *plain* has padded rows, layers that are not compiled, an engine in process and a fixed
number of micro-batches. The run *fast* has packed rows, shared prompts, compiled layers, an engine pool, micro-batches
by tokens, some of them empty, and checkpoints in the background; *whole*, of FSDP2 only, also keeps gathered weights
(``policy.reshard: false``). Rank R writes ``FOLDER/RUN-R.pt`` for each run.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy

from lgrpo import ClippedLoss, Sampling, TransformersEngine
from lgrpo.callbacks import ExactResume
from lgrpo.engines import EnginePool
from tests.helpers import Run, build, tiny_policy


def strategy(kind: str) -> Strategy:
    if kind == "ddp":  # buckets smaller than a layer
        return DDPStrategy(process_group_backend="gloo", bucket_cap_mb=0.01, gradient_as_bucket_view=True)
    return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")


RUNS = {"ddp": ["plain", "fast"], "fsdp2": ["plain", "fast", "whole"]}


def make(kind: str, folder: Path, name: str) -> Run:
    fast, whole = name != "plain", {"reshard": False} if name == "whole" else {}
    data: dict[str, Any] = {"engine": TransformersEngine(), "sampling": Sampling(max_tokens=16)}
    trainer: dict[str, Any] = {"accumulate_grad_batches": 4}
    policy = tiny_policy(attention="sdpa", chunk_size=1000)
    callbacks: list[Any] = [ExactResume(background=fast)]
    if fast:
        policy = tiny_policy(compile=True, activation_memory=0.5, chunk_size=5, share_prompts=True, **whole)
        pool = EnginePool(TransformersEngine(), num_processes=1)
        data |= {"engine": pool, "generate_ahead": True, "micro_batch_tokens": 40}
        trainer = {"enable_checkpointing": True}
        callbacks.append(ModelCheckpoint(folder / name, filename="{step}", every_n_train_steps=2))
    return build(
        v=2,
        rollouts=4,
        loss=ClippedLoss(kl_coef=0.1),
        policy=policy,
        callbacks=callbacks,
        data=data,
        trainer=trainer | {"devices": 2, "strategy": strategy(kind), "gradient_clip_val": 0.5},
    )


def main() -> None:
    kind, folder = sys.argv[1], Path(sys.argv[2])
    for name in RUNS[kind]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        run = make(kind, folder, name)
        run.trainer.fit(run.module, datamodule=run.data)
        state = {
            "weights": dict(run.module.policy_weights()),  # gathered on both ranks
            "tokens": [batch.tokens for batch in run.recorder.rollouts],
            "logged": run.logged,
            "micro_batches": run.trainer.accumulate_grad_batches,
            "num_rows": run.recorder.num_rows,
            "io": type(run.trainer.strategy.checkpoint_io).__name__,
            "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
        }
        torch.save(state, folder / f"{name}-{run.trainer.global_rank}.pt")


if __name__ == "__main__":
    main()
