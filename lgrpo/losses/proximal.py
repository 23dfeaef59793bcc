"""Memory of log π_k from the first pass over a rollout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lgrpo.types import RolloutBatch


class ProximalMemory:
    """Log-probabilities of each row from the first pass over a rollout, when the policy was the proximal policy.

    ``logprobs`` stores them when it first sees a row of a rollout and returns them in later passes. The first row of
    another rollout clears the memory.
    """

    def __init__(self) -> None:
        self._rollout = -1
        self._rows: dict[int, Tensor] = {}

    def logprobs(self, batch: RolloutBatch, policy_logprobs: Tensor) -> Tensor:
        """Return log π_k [B, T] of a batch: part of the batch, stored, or on the first pass ``policy_logprobs``."""
        if batch.proximal_logprobs is not None:
            return batch.proximal_logprobs
        if batch.rollout != self._rollout:
            self._rollout, self._rows = batch.rollout, {}
        proximal = torch.zeros_like(policy_logprobs)
        for i, row in enumerate(batch.rows.tolist()):
            mask = batch.completion_mask[i]
            if row not in self._rows:
                self._rows[row] = policy_logprobs[i][mask].cpu()
            proximal[i, mask] = self._rows[row].to(proximal)
        return proximal

    def state_dict(self) -> dict[str, Any]:
        return {"rollout": self._rollout, "rows": self._rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rollout, self._rows = state["rollout"], state["rows"]
