"""A run whose policy is spread over two CPU processes (FSDP2): ``python -m tests.two_shards FOLDER [STEP …]``.

It is trained to its end, a sharded checkpoint after every step; then again from each STEP. The weights at every end go
to ``FOLDER/from-STEP.pt`` (0 for the first). Then runs with clipped gradients and activations computed again, in
float32 and in mixed precision: their weights go to ``FOLDER/PRECISION.pt``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy

from lgrpo import ClippedLoss, LoRA, ReferenceRefresh, ZeroVarianceMask
from lgrpo.callbacks import ExactResume, FiniteSteps
from tests.helpers import Run, build, tiny_policy


def spread(devices: int) -> dict[str, Any]:
    """Of the Trainer: as many processes, the policy spread over them."""
    if devices == 1:
        return {"devices": 1}
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")
    return {"devices": devices, "strategy": strategy}


def clipped(devices: int, precision: str, clip: float | None = 0.01) -> Run:
    """Steps of one length, whatever the gradient's: a norm that is not that of all ranks together shows at once."""
    trainer = spread(devices) | {"gradient_clip_val": clip, "precision": precision, "accumulate_grad_batches": 2}
    return build(rollouts=3, learning_rate=1.0, policy=tiny_policy(gradient_checkpointing=True), trainer=trainer)


def adapted(devices: int) -> Run:
    """Adapters, and a reference among them, spread like the rest."""
    return build(
        v=2,
        rollouts=4,
        loss=ClippedLoss(kl_coef=0.1),
        optimizer=torch.optim.AdamW,
        policy=tiny_policy(lora=LoRA(rank=4)),
        callbacks=[ReferenceRefresh(period=2)],
        trainer=spread(devices),
    )


def make(folder: Path, devices: int, saving: bool) -> Run:
    callbacks = [ZeroVarianceMask(0.2), ReferenceRefresh(period=2, decay=0.5), ExactResume(), FiniteSteps()]
    if saving:
        callbacks.append(ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1))
    trainer = spread(devices) | {"accumulate_grad_batches": 2, "default_root_dir": str(folder)}
    return build(
        v=4,
        i=2,
        rollouts=5,
        loss=ClippedLoss(0.05, 0.05, centre="proximal", kl_coef=0.1),
        optimizer=torch.optim.AdamW,
        learning_rate=0.02,
        callbacks=callbacks,
        trainer=trainer | {"enable_checkpointing": saving},
    )


def main() -> None:
    folder, steps = Path(sys.argv[1]), [int(step) for step in sys.argv[2:]]
    for step in [0, *steps]:
        run = make(folder, 2, saving=step == 0)
        run.trainer.fit(run.module, datamodule=run.data, ckpt_path=str(folder / f"step={step}.ckpt") if step else None)
        weights = {name: tensor.clone() for name, tensor in run.module.policy_weights()}  # gathered, on both
        if run.trainer.is_global_zero:
            state = {"weights": weights, "lags": run.recorder.lags, "steps": run.trainer.global_step}
            torch.save(state, folder / f"from-{step}.pt")
    for precision in ("32-true", "bf16-mixed"):
        run = clipped(2, precision)
        run.trainer.fit(run.module, datamodule=run.data)
        weights = {name: tensor.clone() for name, tensor in run.module.policy_weights()}
        if run.trainer.is_global_zero:
            torch.save(weights, folder / f"{precision}.pt")
    run = adapted(2)
    run.trainer.fit(run.module, datamodule=run.data)
    weights = {name: tensor.clone() for name, tensor in run.module.policy_weights()}
    if run.trainer.is_global_zero:
        torch.save(weights, folder / "adapted.pt")


if __name__ == "__main__":
    main()
