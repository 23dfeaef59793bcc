"""Rows of a batch as a model reads them: one sequence for each context of an episode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lgrpo.types import RolloutBatch


class Sequences(NamedTuple):
    """The contexts of a batch, row after row: each is a prompt, its completion, then padding."""

    tokens: Tensor
    """[S, W] int64."""
    sampled: Tensor
    """[S, W] bool: tokens that were sampled in this context. Row after row they are those of ``completion_mask``."""
    rows: Tensor
    """[S] int64: row of each context in the batch."""
    kept: tuple[Tensor, Tensor] | None
    """``RolloutBatch.kept`` of the contexts: [S, K] and [S, W]."""


def sequences(batch: RolloutBatch) -> Sequences:
    """Return the sequences that a model reads: the rows themselves, unless observations were dropped."""
    if batch.contexts is None:
        return Sequences(batch.tokens, batch.completion_mask, torch.arange(len(batch)), batch.kept)
    masks = batch.context_masks()
    sampled = batch.completion_mask[:, None] & masks & (masks.cumsum(1) == 1)  # in no earlier context
    rows, index = masks.any(2).nonzero(as_tuple=True)
    masks, sampled = masks[rows, index], sampled[rows, index]
    order = torch.argsort((~masks).int(), dim=1, stable=True)[:, : int(masks.sum(1).max())]
    tokens, sampled = batch.tokens[rows].gather(1, order), sampled.gather(1, order)
    return Sequences(tokens, sampled, rows, _kept(batch, rows, order, sampled))


def _kept(batch: RolloutBatch, rows: Tensor, order: Tensor, sampled: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the sets of each context's sampled tokens, which row after row are those of the batch."""
    if batch.kept is None:
        return None
    ids, counts = batch.kept
    own = torch.where(sampled, counts[rows].gather(1, order), 0)
    totals = own.sum(1, keepdim=True)
    column = torch.arange(int(totals.max()), device=ids.device)
    flat = ids[torch.arange(ids.shape[1], device=ids.device) < counts.sum(1, keepdim=True)]
    return ids.new_zeros(len(own), len(column)).masked_scatter(column < totals, flat), own


def read_in_context(
    model: Callable[..., tuple[Tensor, ...]], batch: RolloutBatch, *arguments: Any
) -> tuple[Tensor, ...]:
    """Return what a policy computes at each sampled token, [B, T], each in the context in which it was sampled.

    Args:
        model: Policy or reference, called with tokens, the mask of sampled ones, the temperature, and ``arguments``.
        batch: Rows on the model's device.
        arguments: Further arguments of the model.
    """
    own = sequences(batch)
    found = model(own.tokens, own.sampled, batch.temperature, *arguments, kept=own.kept)
    if batch.contexts is None:
        return found
    empty = torch.zeros(batch.tokens.shape, dtype=torch.float32, device=batch.tokens.device)
    return tuple(empty.masked_scatter(batch.completion_mask, values[own.sampled]) for values in found)


def on_device(batch: RolloutBatch, device: torch.device) -> RolloutBatch:
    """Return the batch with the tensors that ``sequences`` reads on a device."""
    names = ("tokens", "attention_mask", "completion_mask", "contexts", "kept_ids", "kept_counts")
    tensors = {name: value.to(device) for name in names if (value := getattr(batch, name)) is not None}
    return replace(batch, **tensors)
