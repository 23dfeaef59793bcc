"""Base class of advantages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor


@dataclass(kw_only=True, slots=True)
class Scores:
    """Scored completions of a whole rollout, of all ranks, with the G siblings of a prompt in adjacent rows."""

    rewards: Tensor
    """Rewards [B]."""
    lengths: Tensor
    """Number of tokens of each completion [B]."""
    draws: Tensor
    """Uniform random number in [0, 1) of each completion [B], for advantages that choose at random."""
    group_size: int


class Advantage(ABC):
    """Value of each completion relative to others of its rollout."""

    @abstractmethod
    def __call__(self, scores: Scores) -> Tensor:
        """Return advantages [B]."""
