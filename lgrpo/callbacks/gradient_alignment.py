"""Cosine of the gradients of consecutive optimizer steps."""

from __future__ import annotations

import lightning as L
import torch
from torch import Tensor

from lgrpo.hooks import RolloutCallback, policy_owner
from lgrpo.policy.gradients import inner_products, local_part
from lgrpo.policy.step_rules import GradientProjection
from lgrpo.policy.strategy import is_sharding


class GradientAlignment(RolloutCallback):
    """Logs ``train/gradient_cosine``: the cosine of a step's gradient with that of the previous step (GAC).

    According to its authors, consecutive gradients are nearly orthogonal on-policy, and if they stay aligned off-policy
    the policy may overshoot. The callback keeps a copy of the gradient, as large as the trained weights. It is not in
    checkpoints, so the first step after a resume has no cosine. ``policy.GradientProjection`` limits the cosine and
    logs it, so with that rule the callback does nothing.
    """

    def __init__(self) -> None:
        self._previous: list[Tensor] = []
        self._rule_logs = False

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._previous = []
        self._rule_logs = isinstance(getattr(pl_module, "step_rule", None), GradientProjection)

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if self._rule_logs:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [local_part(p.grad) for p in parameters if p.grad is not None]
        if not gradients:  # the step is skipped
            return
        if len(gradients) == len(self._previous):
            products = inner_products(list(zip(gradients, self._previous, strict=True)))
            if is_sharding(trainer.strategy):
                products = trainer.strategy.reduce(products, reduce_op="sum")
            across, own, previous = products.tolist()
            if own > 0 and previous > 0:
                policy_owner(trainer).add_metric("train/gradient_cosine", across / (own * previous) ** 0.5)
        self._previous = [gradient.detach().clone() for gradient in gradients]
