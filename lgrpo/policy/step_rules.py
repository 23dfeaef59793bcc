"""Rules for the step: they scale or project the update of an optimizer step."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from lgrpo.checks import check_range
from lgrpo.functional import completion_log_ratio, effective_sample_size
from lgrpo.policy.gradients import inner_products, limit_cosine, local_part
from lgrpo.types import RolloutBatch


class StepRule(ABC):
    """Changes the update of an optimizer step.

    For each step the module calls ``start``, ``see`` with every micro-batch, ``apply`` when the gradient is complete,
    and ``undo`` after the update. What later steps need belongs in the optimizer's state, which is in checkpoints.
    """

    @abstractmethod
    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Prepare a new optimizer, before a checkpoint is loaded into it."""

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
        check_range("EffectiveSampleSize's power", power, above=0, below=math.inf)
        self.power = power
        self._log_ratios: list[Tensor] = []
        self._rates: list[float] = []

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Every optimizer has a learning rate."""

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


@final
class GradientProjection(StepRule):
    """Shortens a gradient along that of the previous step if their cosine is too high (GAC).

    g is the step's gradient, h that of the previous step, both before projection and clipping, and c their cosine.

    - c ≤ ``limit``: g does not change.
    - ``limit`` < c ≤ ``skip_above``: the part of g along h is shortened until the cosine is ``limit``; the part
      orthogonal to h does not change. With ``limit`` 0: g − (⟨g, h⟩ / ⟨h, h⟩) h.
    - c > ``skip_above``: the step is skipped. Weights and moments do not change.

    Xu et al. (arXiv 2603.01501) describe the cosine, the projection onto parts along and orthogonal to h, and skipped
    steps. The cosine that remains after a projection and both defaults are ours.

    A copy of the gradient, as large as the trained weights, is part of the optimizer's state and of checkpoints. FSDP2
    cannot resume with this rule from a checkpoint of a run without it.

    >>> weight = torch.zeros(2, requires_grad=True)
    >>> optimizer, rule = torch.optim.SGD([weight]), GradientProjection(limit=0.0)
    >>> rule.attach(optimizer)
    >>> for gradient in ([1.0, 0.0], [3.0, 4.0]):
    ...     weight.grad = torch.tensor(gradient)
    ...     metrics = rule.apply(optimizer, gather=lambda products: products)
    ...     optimizer.step()
    >>> weight.grad, metrics
    (tensor([0., 4.]), {'train/gradient_cosine': 0.6, 'train/gradient_kept': 0.8})
    """

    KEY = "previous_gradient"

    def __init__(self, limit: float = 0.1, skip_above: float | None = None) -> None:
        """
        Args:
            limit: Largest cosine of consecutive gradients, from 0 to below 1.
            skip_above: Cosine above which a step is skipped; by default none is.
        """
        check_range("GradientProjection's limit", limit, at_least=0, below=1)
        if skip_above is not None:
            check_range("GradientProjection's skip_above", skip_above, above=limit, at_most=1)
        self.limit = limit
        self.skip_above = skip_above
        self._gradients: dict[Tensor, Tensor] = {}

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        # A hook, because FSDP2 loads only what the state contains after a step with gradients of 0. The optimizer must
        # have initialised its state before a key is added.
        optimizer.register_step_post_hook(lambda stepped, args, kwargs: self._keep(stepped))

    def start(self) -> None:
        self._gradients = {}

    def see(self, batch: RolloutBatch, policy_logprobs: Tensor) -> None:
        """Nothing depends on the samples."""

    def apply(self, optimizer: torch.optim.Optimizer, gather: Callable[[Tensor], Tensor]) -> dict[str, float]:
        gradients = {p: p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
        self._gradients = {p: gradient.detach().clone() for p, gradient in gradients.items()}
        parts = [(local_part(g), local_part(self._previous(optimizer, p, g))) for p, g in gradients.items()]
        # a sum over ranks that hold the same gradient multiplies all three products, which cancels below
        across, square, previous = gather(inner_products(parts).cpu()).view(-1, 3).sum(0).tolist()
        if not math.isfinite(square):  # the gradient scaler skips the step
            self._gradients = {}
            return {}
        if square == 0 or previous == 0:  # among them the first step, and one that FiniteSteps skips
            return {}
        cosine = across / math.sqrt(square * previous)
        kept = 1.0
        if self.skip_above is not None and cosine > self.skip_above:
            kept = 0.0
            for p in gradients:
                p.grad = None  # optimizers skip parameters without a gradient
        elif cosine > self.limit:
            factor, kept = limit_cosine(cosine, self.limit)
            for g, h in parts:
                g.sub_(h, alpha=factor * math.sqrt(square / previous))
        return {"train/gradient_cosine": cosine, "train/gradient_kept": kept}

    def _previous(self, optimizer: torch.optim.Optimizer, parameter: Tensor, gradient: Tensor) -> Tensor:
        """Return the previous gradient of a parameter, zeros if there is none."""
        known = parameter in optimizer.state and self.KEY in optimizer.state[parameter]
        previous: Tensor = optimizer.state[parameter][self.KEY] if known else torch.zeros_like(gradient)
        return previous

    def undo(self, optimizer: torch.optim.Optimizer) -> None:
        """Nothing lasts beyond the step except the gradient."""

    def _keep(self, optimizer: torch.optim.Optimizer) -> None:
        """Put the gradients of the step that ends into the optimizer's state."""
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if parameter in self._gradients:
                optimizer.state[parameter][self.KEY] = self._gradients[parameter]
            elif parameter.grad is not None:
                optimizer.state[parameter].setdefault(self.KEY, torch.zeros_like(parameter.grad))
        self._gradients = {}


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
