"""What an advantage is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor


@dataclass(kw_only=True, slots=True)
class Scores:
    """The scored completions of a whole rollout, of all ranks, the G siblings of a prompt side by side."""

    rewards: Tensor
    """[B] as the reward gave them."""
    lengths: Tensor
    """[B] tokens of each completion."""
    draws: Tensor
    """[B] a uniform number of each completion's own, in [0, 1): for an advantage that chooses at random."""
    group_size: int


class Advantage(ABC):
    """How good each completion is beside the others of its rollout."""

    @abstractmethod
    def __call__(self, scores: Scores) -> Tensor:
        """Advantages [B]."""
