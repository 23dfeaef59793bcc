"""pass@k, maj@k and standard errors over problems."""

from __future__ import annotations

import torch
from torch import Tensor


def pass_at_k(num_samples: Tensor, num_correct: Tensor, k: int) -> Tensor:
    """Return the unbiased estimate ``1 - C(n-c, k) / C(n, k)`` per problem, from c right answers in n samples.

    >>> pass_at_k(torch.tensor([4, 4, 4]), torch.tensor([0, 1, 4]), k=2)
    tensor([0.0000, 0.5000, 1.0000])
    """
    if k < 1 or bool((num_samples < k).any()):
        raise ValueError(f"pass@{k} requires k of at least 1, and at least k samples of every problem")
    n, c = num_samples.double(), num_correct.double()
    terms = torch.arange(k, dtype=torch.float64, device=n.device)
    factors = ((n - c)[:, None] - terms).clamp(min=0) / (n[:, None] - terms)
    return (1 - factors.prod(1)).float()


def majority_at_k(answers: Tensor, correct: Tensor, k: int) -> Tensor:
    """Return how often the most common of k answers is right, per problem, over all whole blocks of k samples.

    ``answers`` [problems, samples] numbers the different answers to a problem from 0; -1 has no vote. Ties go to the
    answer that comes first in the block.

    >>> answers = torch.tensor([[0, 1, 1, 2], [0, 1, -1, -1], [-1, -1, -1, -1]])
    >>> correct = torch.tensor([[0, 1, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]]).bool()
    >>> majority_at_k(answers, correct, k=4)
    tensor([1., 0., 0.])
    """
    if not 1 <= k <= answers.shape[1]:
        raise ValueError(f"maj@{k} requires k of at least 1, and at least k samples of every problem")
    num_blocks = answers.shape[1] // k
    shape = (len(answers), num_blocks, k)
    answers, correct = answers[:, : num_blocks * k].reshape(shape), correct[:, : num_blocks * k].reshape(shape)
    numbers = torch.arange(int(answers.max().clamp(min=0)) + 1, device=answers.device)
    is_answer = answers[..., None] == numbers
    rank = is_answer.sum(2) * (k + 1) - is_answer.int().argmax(2)  # by count, then by first occurrence
    winner = rank.argmax(-1, keepdim=True)
    first = (answers == winner).int().argmax(-1, keepdim=True)
    right = correct.gather(-1, first).squeeze(-1) & (answers >= 0).any(-1)
    return right.float().mean(1)


def standard_error(values: Tensor) -> Tensor:
    """Return the standard error of the mean of independent values; 0 for a single value.

    >>> standard_error(torch.tensor([0.0, 1.0, 1.0, 0.0]))
    tensor(0.2887)
    """
    if len(values) < 2:
        return torch.zeros((), device=values.device)
    return values.std() / len(values) ** 0.5
