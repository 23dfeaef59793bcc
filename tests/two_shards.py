"""A run whose policy is spread over two CPU processes: ``python -m tests.two_shards fsdp|fsdp2 FOLDER [STEP …]``.

It is trained to its end, a sharded checkpoint after every step; then again from each STEP. The weights at every end go
to ``FOLDER/from-STEP.pt`` (0 for the first). Then runs with clipped gradients and activations computed again, in
float32 and in mixed precision: their weights go to ``FOLDER/PRECISION.pt``. Then one with adapters.
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
from tests.on_cpu import FSDPOnCPU, PrecisionOnCPU


def spread(kind: str | None, precision: str = "32-true") -> dict[str, Any]:
    """Of the Trainer: two processes, the policy spread over them; or one."""
    if kind is None:
        return {"devices": 1, "precision": precision}
    if kind == "fsdp":
        plugin = PrecisionOnCPU(precision)  # type: ignore[arg-type]
        return {"devices": 2, "strategy": FSDPOnCPU(state_dict_type="sharded"), "plugins": [plugin]}
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")
    return {"devices": 2, "strategy": strategy, "precision": precision}


def clipped(kind: str | None, precision: str, clip: float | None = 0.01) -> Run:
    """Steps of one length, whatever the gradient's: a norm that is not that of all ranks together shows at once."""
    trainer = spread(kind, precision) | {"gradient_clip_val": clip, "accumulate_grad_batches": 2}
    return build(
        rollouts=3,
        learning_rate=1.0,
        policy=tiny_policy(gradient_checkpointing=True),
        data={"behaviour_logprobs": "policy"},  # passes outside a step
        trainer=trainer,
    )


def adapted(kind: str | None) -> Run:
    """Adapters, and a reference among them, spread like the rest."""
    return build(
        v=2,
        rollouts=4,
        loss=ClippedLoss(kl_coef=0.1),
        optimizer=torch.optim.AdamW,
        policy=tiny_policy(lora=LoRA(rank=4)),
        callbacks=[ReferenceRefresh(period=2)],
        trainer=spread(kind),
    )


def make(folder: Path, kind: str | None, saving: bool) -> Run:
    callbacks = [ZeroVarianceMask(0.2), ReferenceRefresh(period=2, decay=0.5), ExactResume(), FiniteSteps()]
    if saving:
        callbacks.append(ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1))
    trainer = spread(kind) | {"default_root_dir": str(folder)}
    return build(
        v=4,
        i=2,
        rollouts=5,
        loss=ClippedLoss(0.05, 0.05, centre="proximal", kl_coef=0.1),
        optimizer=torch.optim.AdamW,
        learning_rate=0.02,
        callbacks=callbacks,
        trainer=trainer | {"accumulate_grad_batches": 2, "enable_checkpointing": saving},
    )


def train(run: Run, checkpoint: Path | None, out: Path) -> None:
    """To the end, from where a checkpoint stands."""
    run.trainer.fit(run.module, datamodule=run.data, ckpt_path=checkpoint and str(checkpoint))
    state = {"weights": dict(run.module.policy_weights())}  # gathered, on both
    if run.module.needs_reference:
        state["reference"] = dict(run.module.reference_weights())
    if run.trainer.is_global_zero:
        torch.save(state | {"lags": run.recorder.lags, "steps": run.trainer.global_step}, out)


def main() -> None:
    kind, folder, steps = sys.argv[1], Path(sys.argv[2]), [int(step) for step in sys.argv[3:]]
    train(make(folder, kind, saving=True), None, folder / "from-0.pt")
    for step in steps:
        train(make(folder, kind, saving=False), folder / f"step={step}.ckpt", folder / f"from-{step}.pt")
    for precision in ("32-true", "bf16-mixed"):
        train(clipped(kind, precision), None, folder / f"{precision}.pt")
    if kind == "fsdp2":  # the first refuses adapters
        train(adapted(kind), None, folder / "adapted.pt")


if __name__ == "__main__":
    main()
