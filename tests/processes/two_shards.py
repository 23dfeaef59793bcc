"""Train a policy sharded over two CPU processes: ``python -m tests.processes.two_shards fsdp|fsdp2 FOLDER [STEP …]``.

The run writes a sharded checkpoint after every step, then is resumed from each STEP. Final weights are written to
``FOLDER/from-STEP.pt`` (0: not resumed). Runs with clipped gradients and activation checkpointing in float32 and mixed
precision write ``FOLDER/PRECISION.pt``; a run with an infinite gradient writes
``FOLDER/skipping.pt``, one with adapters ``FOLDER/adapted.pt``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy

from lgrpo import ClippedLoss, LoRA, ReferenceRefresh, Sampling, ZeroVarianceMask
from lgrpo.callbacks import ExactResume, FiniteSteps
from tests.helpers import Run, build, tiny_policy
from tests.processes.fsdp_on_cpu import FSDPOnCPU, PrecisionOnCPU


def sharded(kind: str | None, precision: str = "32-true") -> dict[str, Any]:
    """Return the Trainer's arguments: two processes that shard the policy, or one process."""
    if kind is None:
        return {"devices": 1, "precision": precision}
    if kind == "fsdp":
        plugin = PrecisionOnCPU(precision)  # type: ignore[arg-type]
        return {"devices": 2, "strategy": FSDPOnCPU(state_dict_type="sharded"), "plugins": [plugin]}
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")
    return {"devices": 2, "strategy": strategy, "precision": precision}


def clipped(kind: str | None, precision: str, clip: float | None = 0.01) -> Run:
    """Build a run whose steps all have the clipped length, so that a norm over one rank only would show."""
    trainer = sharded(kind, precision) | {"gradient_clip_val": clip, "accumulate_grad_batches": 2}
    return build(
        rollouts=3,
        learning_rate=1.0,
        policy=tiny_policy(gradient_checkpointing=True),
        # forward passes outside of training_step, with sets of kept tokens
        data={"behaviour_logprobs": "policy", "sampling": Sampling(max_tokens=6, top_k=7)},
        trainer=trainer,
    )


def adapted(kind: str | None) -> Run:
    """Build a run with sharded adapters, the reference being one of them."""
    return build(
        v=2,
        rollouts=4,
        loss=ClippedLoss(kl_coef=0.1),
        optimizer=torch.optim.AdamW,
        policy=tiny_policy(lora=LoRA(rank=4)),
        callbacks=[ReferenceRefresh(period=2)],
        trainer=sharded(kind),
    )


def make(folder: Path, kind: str | None, saving: bool) -> Run:
    callbacks = [ZeroVarianceMask(0.2), ReferenceRefresh(period=2, decay=0.5), ExactResume(), FiniteSteps()]
    if saving:
        callbacks.append(ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1))
    trainer = sharded(kind) | {"default_root_dir": str(folder)}
    return build(
        v=4,
        i=2,
        rollouts=5,
        loss=ClippedLoss(0.05, 0.05, centre="proximal", kl_coef=0.1),
        optimizer=torch.optim.AdamW,
        learning_rate=0.02,
        callbacks=callbacks,
        data={"sampling": Sampling(max_tokens=16), "micro_batch_tokens": 40},  # some micro-batches are empty
        trainer=trainer | {"enable_checkpointing": saving},
    )


class InfiniteGradient(L.Callback):
    """Sets the gradients of the last rank to infinity at step 1."""

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.global_step == 1 and trainer.global_rank == trainer.world_size - 1:
            for parameter in pl_module.parameters():
                if parameter.grad is not None:
                    parameter.grad.fill_(torch.inf)


def train(run: Run, checkpoint: Path | None, out: Path) -> None:
    """Train to the end, from a checkpoint if given, and save the gathered weights."""
    run.trainer.fit(run.module, datamodule=run.data, ckpt_path=checkpoint and str(checkpoint))
    state = {"weights": dict(run.module.policy_weights())}  # gathered on both ranks
    if run.module.loss.needs_reference:
        state["reference"] = dict(run.module.reference_weights())
    if run.trainer.is_global_zero:
        seen = {"lags": run.recorder.lags, "steps": run.trainer.global_step, "logged": run.logged}
        torch.save(state | seen | {"num_rows": run.recorder.num_rows}, out)


def main() -> None:
    kind, folder, steps = sys.argv[1], Path(sys.argv[2]), [int(step) for step in sys.argv[3:]]
    train(make(folder, kind, saving=True), None, folder / "from-0.pt")
    for step in steps:
        train(make(folder, kind, saving=False), folder / f"step={step}.ckpt", folder / f"from-{step}.pt")
    for precision in ("32-true", "bf16-mixed"):
        train(clipped(kind, precision), None, folder / f"{precision}.pt")
    callbacks = [InfiniteGradient(), FiniteSteps()]
    skipping = build(rollouts=3, callbacks=callbacks, trainer=sharded(kind) | {"default_root_dir": str(folder)})
    train(skipping, None, folder / "skipping.pt")
    if kind == "fsdp2":  # FSDP1 refuses adapters
        train(adapted(kind), None, folder / "adapted.pt")


if __name__ == "__main__":
    main()
