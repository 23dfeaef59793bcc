"""Two FSDP2 ranks share one vLLM server: ``python -m tests.processes.two_servers FOLDER``.

They train, resume inside a cycle, lose the server while only rank 1 samples, try to reach one that does not exist, and
train with vLLM in each process. Each rank writes its results to ``FOLDER/RANK.pt``.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy

from lgrpo import Prompt, RolloutRecorder, Sampling
from lgrpo.callbacks import ExactResume
from lgrpo.engines import RolloutEngine, Timeouts, VLLMEngine, VLLMServerEngine
from tests.helpers import Run, build


def make(folder: Path, name: str, engine: RolloutEngine, callbacks: list[Any], **trainer: Any) -> Run:
    """Build a run that records its completions, with settings of the Trainer."""
    return build(
        v=4,
        rollouts=6,
        data={"engine": engine},
        callbacks=[RolloutRecorder(path=str(folder / f"{name}-rollouts")), ExactResume(), *callbacks],
        trainer={"default_root_dir": str(folder / name), "limit_val_batches": 1.0} | trainer,
    )


def sharded() -> dict[str, Any]:
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")
    return {"devices": 2, "strategy": strategy}


def weights(run: Run) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in run.module.policy_weights()}  # gathered on both ranks


def main() -> None:
    folder = Path(sys.argv[1])
    engine = VLLMServerEngine(timeouts=Timeouts(generate=120))
    saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    run = make(folder, "two", engine, [saving], enable_checkpointing=True, **sharded())
    run.trainer.fit(run.module, datamodule=run.data)
    rank = run.trainer.global_rank
    seen: dict[str, Any] = {
        "weights": weights(run),
        "ledger": [record.as_dict() for record in engine.state.ledger],
        "logged": run.logged,
        "num_processes": sum(server.process is not None for server in engine.group.servers),
        "addresses": [(server.url, server.api_key) for server in engine.group.servers],
    }

    again = make(folder, "again", engine, [], **sharded())
    again.trainer.fit(again.module, datamodule=again.data, ckpt_path=str(folder / "step=2.ckpt"))
    seen["again"] = weights(again)
    seen["again_ledger"] = [record.as_dict() for record in engine.state.ledger]

    engine.load_weights(again.module.policy_weights(), step=9)
    tokenizer = again.module.policy.tokenizer
    prompt = Prompt(text="12>", token_ids=tokenizer("12>").input_ids, position=0, row={})
    seen["before"] = engine.generate([prompt], 4, Sampling(max_tokens=6), 0, tokenizer)
    dist.barrier()
    if rank == 0:
        os.kill(engine.group.servers[0].process.pid, signal.SIGKILL)
    dist.barrier()
    seen["after"] = engine.generate([prompt], 4, Sampling(max_tokens=6), 0, tokenizer) if rank == 1 else seen["before"]
    dist.barrier()
    seen["faults"] = asdict(engine.faults)

    start = time.monotonic()
    try:
        unreachable = VLLMServerEngine(urls=["http://127.0.0.1:9"], timeouts=Timeouts(start=1))
        unreachable.load_weights(again.module.policy_weights(), 0)
    except RuntimeError as error:
        seen["error"] = f"{type(error).__name__}: {error}"
    seen["error_seconds"] = time.monotonic() - start

    inside = make(folder, "inside", VLLMEngine(), [], **sharded())
    inside.trainer.fit(inside.module, datamodule=inside.data)
    seen["inside"] = weights(inside)
    seen["inside_ledger"] = [record.as_dict() for record in inside.data.engine.state.ledger]
    seen["inside_logged"] = inside.logged
    torch.save(seen, folder / f"{rank}.pt")
    dist.barrier()
    engine.close()


if __name__ == "__main__":
    main()
