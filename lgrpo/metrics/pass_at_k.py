"""pass@k over a set of problems."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from lgrpo.functional import pass_at_k


class PassAtK(Metric):
    """pass@1, pass@2, pass@4 … up to the number of samples drawn, each the mean over problems.

    >>> metric = PassAtK()
    >>> metric.update(torch.tensor([[True, False], [False, False]]))
    >>> metric.compute()
    {1: tensor(0.2500), 2: tensor(0.5000)}
    """

    full_state_update = False
    higher_is_better = True

    num_samples: list[Tensor]
    num_correct: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("num_samples", default=[], dist_reduce_fx="cat")
        self.add_state("num_correct", default=[], dist_reduce_fx="cat")

    def update(self, correct: Tensor) -> None:
        """Adds problems: ``correct`` is [problems, samples] bool."""
        self.num_samples.append(torch.full((len(correct),), correct.shape[1], device=correct.device))
        self.num_correct.append(correct.sum(1))

    def compute(self) -> dict[int, Tensor]:
        samples, correct = dim_zero_cat(self.num_samples), dim_zero_cat(self.num_correct)
        most = int(samples.min())
        ks = sorted({2**j for j in range(most.bit_length()) if 2**j <= most} | {most})
        return {k: pass_at_k(samples, correct, k).mean() for k in ks}
