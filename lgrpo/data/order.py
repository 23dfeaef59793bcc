"""Orders of training rows: which row has which position in a run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import final

import torch


class Order(ABC):
    """Rows by position in an endless run; the same on every rank and after a resume."""

    @abstractmethod
    def row_at(self, position: int) -> int:
        """Return the index of the row at a position."""

    def draw(self, positions: Sequence[int]) -> list[int]:
        """Return the rows at positions that are about to be sampled. From then on ``row_at`` returns these."""
        return [self.row_at(position) for position in positions]


class Passes(Order):
    """Pass after pass over the rows, each with its own order."""

    def __init__(self, num_rows: int, seed: int | None) -> None:
        self._num_rows = num_rows
        self._seed = seed
        self._current: tuple[int, list[int]] = (-1, [])

    @abstractmethod
    def order_of(self, epoch: int) -> list[int]:
        """Return the rows of a pass in order."""

    def row_at(self, position: int) -> int:
        epoch, offset = divmod(position, self._num_rows)
        current = self._current
        if current[0] != epoch:
            self._current = current = (epoch, self.order_of(epoch))
        return current[1][offset]

    def _generator(self, epoch: int) -> torch.Generator:
        return torch.Generator().manual_seed(hash((self._seed, epoch)) % 2**63)


@final
class Shuffled(Passes):
    """Every row once in each pass, in a random order; a seed of None keeps the order of the rows."""

    def order_of(self, epoch: int) -> list[int]:
        if self._seed is None:
            return list(range(self._num_rows))
        return torch.randperm(self._num_rows, generator=self._generator(epoch)).tolist()


@final
class Weighted(Passes):
    """Rows drawn by weight with replacement, in each pass as many as there are rows."""

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        super().__init__(len(weights), seed)
        self._bounds = torch.tensor(weights, dtype=torch.float64).cumsum(0)

    def order_of(self, epoch: int) -> list[int]:
        points = torch.rand(self._num_rows, generator=self._generator(epoch), dtype=torch.float64) * self._bounds[-1]
        return torch.searchsorted(self._bounds, points, right=True).clamp_(max=self._num_rows - 1).tolist()
