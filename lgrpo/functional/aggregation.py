"""Aggregation of a loss per token to a scalar. The denominator belongs to the whole optimizer step."""

from __future__ import annotations

import torch
from torch import Tensor


def token_mean(values: Tensor, mask: Tensor, num_tokens: float | Tensor) -> Tensor:
    """Divide the sum over the tokens of ``mask`` by the tokens of the step; 0 if there are none.

    >>> values = torch.tensor([[1.0, 2.0], [3.0, 9.0]])
    >>> mask = torch.tensor([[True, True], [True, False]])
    >>> token_mean(values, mask, num_tokens=3)
    tensor(2.)
    """
    return _sum(values, mask) / max(float(num_tokens), 1.0)


def sequence_mean(values: Tensor, mask: Tensor, lengths: Tensor, num_sequences: float | Tensor) -> Tensor:
    """Divide each row's sum by its length, then average over the sequences of the step.

    >>> values = torch.tensor([[1.0, 2.0], [3.0, 9.0]])
    >>> mask = torch.tensor([[True, True], [True, False]])
    >>> sequence_mean(values, mask, lengths=torch.tensor([2, 1]), num_sequences=2)
    tensor(2.2500)
    """
    rows = torch.where(mask, values, 0.0).sum(1) / lengths.clamp(min=1)
    return rows.sum() / max(float(num_sequences), 1.0)


def sequence_sum(values: Tensor, mask: Tensor, num_sequences: float | Tensor) -> Tensor:
    """Divide the sum over the tokens of ``mask`` by the sequences of the step; 0 if there are none (LUSPO).

    >>> values = torch.tensor([[1.0, 2.0], [3.0, 9.0]])
    >>> mask = torch.tensor([[True, True], [True, False]])
    >>> sequence_sum(values, mask, num_sequences=2)
    tensor(3.)
    """
    return _sum(values, mask) / max(float(num_sequences), 1.0)


def constant_sum(values: Tensor, mask: Tensor, constant: float) -> Tensor:
    """Divide the sum over the tokens of ``mask`` by a constant (Dr. GRPO: B · longest allowed length).

    >>> constant_sum(torch.tensor([[1.0, 2.0]]), torch.tensor([[True, True]]), constant=10.0)
    tensor(0.3000)
    """
    return _sum(values, mask) / constant


def _sum(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, 0.0).sum()
