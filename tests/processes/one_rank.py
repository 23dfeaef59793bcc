"""Train in one process with FSDP, then with FSDP2: ``python -m tests.processes.one_rank FOLDER``.

Each trains four rollouts, then resumes from the checkpoint after two. Observations are written to ``FOLDER/fsdp.pt``
and ``FOLDER/fsdp2.pt``. On a GPU vLLM samples; on a CPU a tiny model is trained with the embedded engine.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor

from lgrpo import ClippedLoss, GRPOModule, ReferenceRefresh, RolloutCallback, TransformersEngine
from lgrpo.callbacks import ExactResume, FiniteSteps
from lgrpo.engines import RolloutEngine, VLLMEngine
from tests.gpu import SHAPE
from tests.helpers import MODEL, Run, build, tiny_policy
from tests.processes.fsdp_on_cpu import FSDPOnCPU, PrecisionOnCPU

HAS_GPU = torch.cuda.is_available()
CONFIG = SHAPE | {"max_position_embeddings": 64}


class Watch(RolloutCallback):
    """Record whether the engine holds the policy's weights at each rollout, and the policy before each step."""

    order = 1  # after the sync

    def __init__(self) -> None:
        self.agree: list[bool] = []
        self.policies: dict[int, dict[str, Tensor]] = {}
        self.dtypes: set[torch.dtype] = set()
        self.devices: set[str] = set()

    def on_rollout_start(self, trainer: L.Trainer, pl_module: Any, rollout: int) -> None:
        held = trainer.datamodule.engine.state_dict()["weights"]  # type: ignore[attr-defined]
        policy = {name: tensor.to(torch.bfloat16) for name, tensor in pl_module.policy_weights()}
        assert held.keys() == policy.keys()
        self.agree.append(all(torch.equal(held[name].cpu(), tensor.cpu()) for name, tensor in policy.items()))

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        self.policies[trainer.global_step] = copied(pl_module)
        self.dtypes |= {parameter.dtype for parameter in pl_module.policy.parameters()}
        self.devices |= {parameter.device.type for parameter in pl_module.parameters()}

    def seen(self) -> dict[str, Any]:
        return {"agree": self.agree, "policies": self.policies, "dtypes": self.dtypes, "devices": self.devices}


def copied(module: GRPOModule) -> dict[str, Tensor]:
    """Return a copy of the policy's current weights."""
    return {name: tensor.to("cpu", copy=True) for name, tensor in module.policy_weights()}


def strategy(kind: str) -> dict[str, Any]:
    """Return the Trainer's arguments for a strategy."""
    if kind == "fsdp2":
        backend = "nccl" if HAS_GPU else "gloo"
        held = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1, process_group_backend=backend)
        return {"strategy": held, "precision": "bf16-mixed"}
    if HAS_GPU:
        return {"strategy": FSDPStrategy(state_dict_type="full"), "precision": "bf16-mixed"}
    return {"strategy": FSDPOnCPU(state_dict_type="full"), "plugins": [PrecisionOnCPU("bf16-mixed")]}


def make(folder: Path, kind: str, engine: RolloutEngine, watch: Watch, *, saving: bool) -> Run:
    callbacks = [watch, ExactResume(), FiniteSteps(), ReferenceRefresh(period=2)]
    if saving:
        callbacks.append(ModelCheckpoint(folder / kind, filename="{step}", every_n_train_steps=1, save_top_k=-1))
    trainer = {
        "accelerator": "cuda" if HAS_GPU else "cpu",
        "gradient_clip_val": 0.5,
        "accumulate_grad_batches": 2,
        "enable_checkpointing": saving,
        "default_root_dir": str(folder / kind),
    }
    return build(
        v=2,
        rollouts=4,
        loss=ClippedLoss(kl_coef=0.1),
        optimizer=torch.optim.AdamW,
        learning_rate=1e-3,
        policy=tiny_policy(config=CONFIG if HAS_GPU else MODEL, gradient_checkpointing=True),
        callbacks=callbacks,
        data={"engine": engine},
        trainer=trainer | strategy(kind),
    )


def main() -> None:
    folder = Path(sys.argv[1])
    engine: RolloutEngine = TransformersEngine(dtype="bfloat16")
    if HAS_GPU:
        settings: dict[str, Any] = {"gpu_memory_utilization": 0.2, "kv_cache_gib": 0.5, "max_num_seqs": 64}
        engine = VLLMEngine(dtype="bfloat16", enforce_eager=True, seeded=True, **settings)
    for kind in ("fsdp", "fsdp2"):
        watch, later = Watch(), Watch()
        run = make(folder, kind, engine, watch, saving=True)
        run.trainer.fit(run.module, datamodule=run.data)
        again = make(folder, kind, engine, later, saving=False)
        again.trainer.fit(again.module, datamodule=again.data, ckpt_path=str(folder / kind / "step=2.ckpt"))
        seen = {
            "steps": (run.trainer.global_step, again.trainer.global_step),
            "watch": watch.seen(),
            "later": later.seen(),
            "logged": run.logged,
            "end": copied(run.module),
            "later_end": copied(again.module),
        }
        torch.save(seen, folder / f"{kind}.pt")
    engine.close()


if __name__ == "__main__":
    main()
