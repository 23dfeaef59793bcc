"""Terms of the improvement theorem, its calibration, and lags, over micro-batches and ranks."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from lgrpo.functional import expected_gain, has_reward_variance, improvement_terms, standard_error
from lgrpo.metrics.step import LAG_BUCKETS, LAG_EDGES

ON_VARIED = ("s", "coefficient", "surrogate", "bound")
"""Terms that divide by s. They are averaged over the prompts whose rewards differ: s means nothing for others."""
WITH_ERROR = ("gain", "surrogate", "tv", "bound")
VACUOUS = -1.0
"""A lower bound of the improvement that is not above it says nothing: rewards are in [0, 1]."""
TRUST_REGION = ("surrogate_trm", "penalty_trm", "kl_token_max", "tv_token_max")


class ImprovementMetrics(Metric):
    """Mean over prompts of every term of Mroueh et al.'s Theorem 1 and of TRM's bound, with standard errors.

    Without the terms of TRM in ``update``, its bound is left out.

    >>> metric = ImprovementMetrics()
    >>> log_ratio = torch.tensor([[1.2, 0.8], [1.1, 0.9]]).log()
    >>> rewards = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    >>> metric.update(log_ratio=log_ratio, proximal_log_ratio=torch.zeros(2, 2), rewards=rewards)
    >>> metrics = metric.compute()
    >>> {name: round(float(metrics[name]), 3) for name in ("gain", "gain_stderr", "gain_varied", "bound_1")}
    {'gain': 0.1, 'gain_stderr': 0.1, 'gain_varied': 0.2, 'bound_1': 0.3}
    """

    full_state_update = False

    log_ratios: list[Tensor]
    proximal_log_ratios: list[Tensor]
    rewards: list[Tensor]
    trust_region: list[Tensor]

    def __init__(self, eps: float = 1e-4) -> None:
        """
        Args:
            eps: Constant added to the variance of the rewards, inside the root.
        """
        super().__init__()
        self.eps = eps
        for name in ("log_ratios", "proximal_log_ratios", "rewards", "trust_region"):
            self.add_state(name, default=[], dist_reduce_fx="cat")

    @torch.no_grad()
    def update(
        self,
        *,
        log_ratio: Tensor,
        proximal_log_ratio: Tensor,
        rewards: Tensor,
        trust_region: dict[str, Tensor] | None = None,
    ) -> None:
        """Add groups, [P, G]: log π/α and log π_k/α of whole completions, and their rewards; and terms of TRM, [P]."""
        if trust_region is not None:
            terms = torch.stack([trust_region[name] for name in TRUST_REGION], 1)
            self.trust_region.append(terms.double().to(self.device))
        self.log_ratios.append(log_ratio.double().to(self.device))
        self.proximal_log_ratios.append(proximal_log_ratio.double().to(self.device))
        self.rewards.append(rewards.double().to(self.device))

    def compute(self) -> dict[str, Tensor]:
        """Return no metric without groups, and no bound and no Bernoulli estimate if a reward is outside [0, 1]."""
        rewards = dim_zero_cat(self.rewards)
        if not len(rewards):
            return {}
        varied = has_reward_variance(rewards.flatten(), rewards.shape[1]).view(rewards.shape)[:, 0]
        terms = improvement_terms(
            dim_zero_cat(self.log_ratios), dim_zero_cat(self.proximal_log_ratios), rewards, self.eps
        )
        if len(self.trust_region):
            terms |= dict(zip(TRUST_REGION, dim_zero_cat(self.trust_region).unbind(1), strict=True))
            terms["bound_trm"] = terms["surrogate_trm"] - terms["penalty_trm"] - terms["tv_proximal"]
        if bool((rewards < 0).any() | (rewards > 1).any()):
            terms = {n: t for n, t in terms.items() if not n.startswith("bound") and not n.endswith("_bernoulli")}
        metrics: dict[str, Tensor] = {"zero_variance_fraction": (~varied).double().mean()}
        terms["gain_varied"] = terms["gain"][varied]
        for name, values in terms.items():
            values = values[varied] if name.startswith(ON_VARIED) else values
            if not len(values):
                continue
            metrics[name] = values.mean()
            if name.startswith(WITH_ERROR):
                metrics[f"{name}_stderr"] = standard_error(values)
            if name.startswith("bound"):
                metrics[f"{name}_positive"] = (values > 0).double().mean()
                metrics[f"{name}_informative"] = (values > VACUOUS).double().mean()
        return metrics


class CalibrationMetrics(Metric):
    """Gain predicted from samples of the old weights, and gain realised by the new weights, on held-out prompts.

    >>> metric = CalibrationMetrics()
    >>> old, new = torch.tensor([[1.0, 0.0], [0.0, 0.0]]), torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    >>> metric.update(log_ratio=torch.tensor([[1.4, 0.6], [1.0, 1.0]]).log(), before=old, after=new)
    >>> {name: round(float(value), 2) for name, value in metric.compute().items() if "stderr" not in name}
    {'predicted': 0.2, 'realised': 0.25, 'error': -0.05, 'reward': 0.5}
    """

    full_state_update = False

    predicted: list[Tensor]
    realised: list[Tensor]
    reward: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        for name in ("predicted", "realised", "reward"):
            self.add_state(name, default=[], dist_reduce_fx="cat")

    @torch.no_grad()
    def update(self, *, log_ratio: Tensor, before: Tensor, after: Tensor) -> None:
        """Add prompts, [P, G]: log ratio new/old of the old weights' completions, their rewards, the new rewards."""
        self.predicted.append(expected_gain(log_ratio.double(), before.double()).to(self.device))
        self.realised.append((after.double().mean(1) - before.double().mean(1)).to(self.device))
        self.reward.append(after.double().mean(1).to(self.device))

    def compute(self) -> dict[str, Tensor]:
        """Return no metric without prompts."""
        predicted, realised = dim_zero_cat(self.predicted), dim_zero_cat(self.realised)
        if not len(predicted):
            return {}
        values = {"predicted": predicted, "realised": realised, "error": predicted - realised}
        metrics = {name: value.mean() for name, value in values.items()} | {"reward": dim_zero_cat(self.reward).mean()}
        return metrics | {f"{name}_stderr": standard_error(value) for name, value in values.items()}


class LagHistogram(Metric):
    """Fraction of completions that trained at each lag, in buckets of doubling width.

    >>> metric = LagHistogram()
    >>> metric.update(torch.tensor([0, 1, 2, 5]))
    >>> {name: float(fraction) for name, fraction in metric.compute().items() if fraction}
    {'lag_0': 0.25, 'lag_1': 0.25, 'lag_2-3': 0.25, 'lag_4-7': 0.25}
    """

    full_state_update = False

    counts: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("counts", default=torch.zeros(len(LAG_BUCKETS), dtype=torch.float64), dist_reduce_fx="sum")

    @torch.no_grad()
    def update(self, lags: Tensor) -> None:
        """Add completions by their lags, in optimizer steps."""
        buckets = torch.bucketize(lags, torch.tensor(LAG_EDGES, device=lags.device), right=True)
        self.counts += buckets.bincount(minlength=len(LAG_BUCKETS)).to(self.counts)

    def compute(self) -> dict[str, Tensor]:
        fractions = self.counts / self.counts.sum().clamp(min=1)
        return {f"lag_{name}": fraction for name, fraction in zip(LAG_BUCKETS, fractions, strict=True)}
