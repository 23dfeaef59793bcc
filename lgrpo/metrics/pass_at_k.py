"""pass@k and maj@k over a set of problems."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from lgrpo.functional import majority_at_k, pass_at_k, standard_error


class PassAtK(Metric):
    """pass@1, pass@2, pass@4 … up to the number of samples, with standard errors, and maj@k for k > 2.

    Each is the mean over problems.

    >>> metric = PassAtK()
    >>> metric.update(torch.tensor([[True, False], [False, False]]))
    >>> {name: round(float(value), 2) for name, value in metric.compute().items()}
    {'pass@1': 0.25, 'pass@1_stderr': 0.25, 'pass@2': 0.5, 'pass@2_stderr': 0.5}
    """

    full_state_update = False
    higher_is_better = True

    correct: list[Tensor]
    answers: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("correct", default=[], dist_reduce_fx="cat")
        self.add_state("answers", default=[], dist_reduce_fx="cat")

    def update(self, correct: Tensor, answers: Tensor | None = None) -> None:
        """Add problems, [problems, samples]: which samples are right, and the number of each answer, -1 for none."""
        self.correct.append(correct)
        self.answers.append(torch.full(correct.shape, -1, device=correct.device) if answers is None else answers)

    def compute(self) -> dict[str, Tensor]:
        correct, answers = dim_zero_cat(self.correct), dim_zero_cat(self.answers)
        num_samples = correct.shape[1]
        counts = torch.full((len(correct),), num_samples, device=correct.device), correct.sum(1)
        ks = sorted({2**j for j in range(num_samples.bit_length()) if 2**j <= num_samples} | {num_samples})
        metrics: dict[str, Tensor] = {}
        for k in ks:
            per_problem = pass_at_k(*counts, k)
            metrics |= {f"pass@{k}": per_problem.mean(), f"pass@{k}_stderr": standard_error(per_problem)}
        if bool((answers >= 0).any()):  # two answers have no majority
            metrics |= {f"maj@{k}": majority_at_k(answers, correct, k).mean() for k in ks if k > 2}
        return metrics
