"""What an advantage is."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor


class Advantage(ABC):
    """How good each completion is beside its siblings."""

    @abstractmethod
    def __call__(self, rewards: Tensor, group_size: int) -> Tensor:
        """Advantages [B] of rewards [B], the G siblings of a prompt side by side."""
