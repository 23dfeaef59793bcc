"""Train on one or two CPU processes and save the weights: ``python -m tests.processes.two_processes DEVICES OUT``."""

from __future__ import annotations

import sys

import torch

from lgrpo import ClippedLoss, Evaluation, RolloutRecorder, Sampling, ZeroVarianceMask
from lgrpo.advantages import Advantage, BatchStd, ComposedAdvantage, DropNegatives, ExponentiallyWeighted, Scores
from lgrpo.data import DynamicSampling
from tests.helpers import build


class WholeRolloutAdvantage(Advantage):
    """An advantage that depends on completions of other ranks and on random draws."""

    def __call__(self, scores: Scores) -> torch.Tensor:
        adaptive = ExponentiallyWeighted(ComposedAdvantage(scale=BatchStd()), temperature="adaptive")
        return adaptive(scores) + DropNegatives()(scores)


def main(devices: int, out: str, num_prompts: int = 4) -> None:
    trainer = {"devices": devices, "accumulate_grad_batches": 2, "limit_val_batches": 1.0}
    if devices > 1:
        trainer["strategy"] = "ddp"
    run = build(
        v=2,
        i=2,
        rollouts=3,
        loss=ClippedLoss(kl_coef=0.1),
        callbacks=[ZeroVarianceMask(0.3), RolloutRecorder(path=f"{out}-rollouts")],
        trainer=trainer,
        data={
            "evaluation": Evaluation(success_reward=0.5),
            "num_prompts": num_prompts,
            "sampling": Sampling(max_tokens=6, top_p=0.9),
            "advantage": WholeRolloutAdvantage(),
            "dynamic_sampling": DynamicSampling(max_rounds=2, tolerance=0.3),
        },
    )
    fresh = build()
    run.trainer.fit(run.module, datamodule=run.data)
    if run.trainer.is_global_zero:
        state = {
            "weights": {name: p.detach().clone() for name, p in run.weights.items()},
            "initial": {name: p.detach().clone() for name, p in fresh.weights.items()},
            "logged": run.logged,
            "world_size": run.trainer.world_size,
            "val/pass@1": float(run.trainer.callback_metrics["val/pass@1"]),
        }
        torch.save(state, out)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
