"""Rules for the step: what they learn from an optimizer step's micro-batches scales the update."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from lgrpo.checks import check_range
from lgrpo.functional import completion_log_ratio, effective_sample_size
from lgrpo.types import RolloutBatch


class StepRule(ABC):
    """Changes the update of an optimizer step.

    For each step the module calls ``start``, ``see`` with every micro-batch, ``apply`` when the gradient is complete,
    and ``undo`` after the update.
    """

    @abstractmethod
    def start(self) -> None:
        """Begin a step."""

    @abstractmethod
    def see(self, batch: RolloutBatch, policy_logprobs: Tensor) -> None:
        """See a micro-batch, with log π_θ [B, T] of its tokens."""

    @abstractmethod
    def apply(self, optimizer: torch.optim.Optimizer, gather: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Change the update; return metrics. ``gather`` joins the vectors of all ranks, which must all call it."""

    @abstractmethod
    def undo(self, optimizer: torch.optim.Optimizer) -> None:
        """Restore what must not last beyond the step, such as the learning rate that a scheduler continues from."""


@final
class EffectiveSampleSize(StepRule):
    """Multiplies the learning rate by a power of the effective sample size (VCPO).

    The effective sample size of n completions with ratios w = π_θ/π_α is (Σ w)² / (n Σ w²), 1 on-policy and 1/n if one
    completion outweighs the others. Completions outside the loss do not count.
    """

    def __init__(self, power: float = 0.5) -> None:
        """
        Args:
            power: Power of the effective sample size: 0.5 for AdamW and similar optimizers, 1 for SGD.
        """
        check_range("EffectiveSampleSize's power", power, above=0)
        self.power = power
        self._log_ratios: list[Tensor] = []
        self._rates: list[float] = []

    def start(self) -> None:
        self._log_ratios = []

    def see(self, batch: RolloutBatch, policy_logprobs: Tensor) -> None:
        log_ratio = completion_log_ratio(policy_logprobs.detach() - batch.behaviour_logprobs, batch.completion_mask)
        own = log_ratio[batch.loss_mask.any(1)].cpu()
        if bool(own.isnan().any()):
            raise ValueError(
                "model.step_rule EffectiveSampleSize compares the policy with the one that sampled, but recorded "
                "completions have no log-probabilities: record them (RolloutRecorder does), or remove the rule"
            )
        self._log_ratios.append(own)

    def apply(self, optimizer: torch.optim.Optimizer, gather: Callable[[Tensor], Tensor]) -> dict[str, float]:
        size = float(effective_sample_size(gather(torch.cat(self._log_ratios))))
        self._rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * size**self.power
        return {"train/effective_sample_size": size}

    def undo(self, optimizer: torch.optim.Optimizer) -> None:
        for group, rate in zip(optimizer.param_groups, self._rates, strict=False):
            group["lr"] = rate
        self._rates = []


def the_rule(rules: StepRule | list[StepRule] | None) -> StepRule | None:
    """Return the rule of a setting; raise a ``ValueError`` if there are several."""
    if not isinstance(rules, list):
        return rules
    if len(rules) > 1:
        names = ", ".join(type(rule).__name__ for rule in rules)
        raise ValueError(
            f"model.step_rule has {len(rules)} rules ({names}), but each is defined for an update that nothing else "
            "changes: keep one"
        )
    return rules[0] if rules else None
