"""Training rows drawn by their measured pass rates.

Rollouts are measured in the order in which they are trained on. Draws read the pass rates as they were at the last
sync, that is, over the rollouts that the sampling weights were trained on. So it makes no difference to the draws of a
cycle when its rollouts are sampled and scored: one by one, in one call, or in the background.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from lgrpo.data.order import Order, Shuffled
from lgrpo.functional.random import stream_uniform
from lgrpo.types import RolloutBatch

MAX_BOOST = 8
"""Upper limit of how much more often a row is drawn than if all were equally likely: the policy would learn a few rows
by heart."""
_ROUNDING = 1e-9
"""Tolerance of the ends of the band: a mean of equal pass rates may be rounded."""
_DRAW_KEY = 7
"""Key of the random numbers of draws, so that they differ from those of completions."""


class Measurement(NamedTuple):
    """Pass rate of a group."""

    position: int
    row: int
    rate: float


@final
class Curriculum(Order):
    """Pass rates of all rows, and the draws that follow from them.

    For each rollout, after its sync if there is one: ``draw`` before it is sampled, ``measure`` on every rank when it
    is scored, and ``record`` with the measurements of all ranks. ``freeze`` after each sync makes what is recorded so
    far count for the draws.
    """

    def __init__(
        self,
        num_rows: int,
        seed: int,
        num_prompts: int,
        *,
        band: tuple[float, float],
        exploration: float,
        replay: float,
        forgetting: float,
    ) -> None:
        self._seed = seed
        self._num_prompts = num_prompts
        self._band = band
        self._exploration = exploration
        self._replay = replay
        self._kept = 1 - forgetting
        self._first_order = Shuffled(num_rows, seed)
        self._passes = torch.zeros(num_rows, dtype=torch.float64)
        self._counts = torch.zeros(num_rows, dtype=torch.float64)
        self._last_recorded = -1
        self._frozen: Tensor | None = None
        """Upper ends of the rows' probabilities as of the last sync; None if nothing was measured then."""
        self._drawn: dict[int, int] = {}
        """Row of every position that this rank has sampled, until its group has been trained on."""
        self._measured: list[int] = []
        """Positions of the groups in the last rollout that was recorded, which may be read until the next one is."""
        self._lock = threading.Lock()

    def row_at(self, position: int) -> int:
        """Return the row that was drawn for a position, or would be drawn now."""
        with self._lock:
            row = self._drawn.get(position)
        return self._choose(position) if row is None else row

    def draw(self, positions: Sequence[int]) -> list[int]:
        rows = [self.row_at(position) for position in positions]
        with self._lock:
            self._drawn.update(zip(positions, rows, strict=True))
        return rows

    def freeze(self) -> None:
        """Draw from now on by the pass rates recorded so far."""
        if bool(self._counts.any()):
            probabilities = draw_probabilities(
                self._rates, self._num_prompts, band=self._band, exploration=self._exploration, replay=self._replay
            )
            self._frozen = probabilities.cumsum(0)

    def measure(self, batch: RolloutBatch, success_reward: float) -> list[Measurement]:
        """Return the pass rates of a rollout's groups that are scored; completions that could not be are left out."""
        found = []
        for rows in torch.arange(len(batch)).split(batch.group_size):
            position, rewards = int(batch.positions[rows[0]]), batch.rewards[rows]
            valid = rewards[~batch.failed[rows]]
            with self._lock:
                row = self._drawn.get(position)
            if row is not None and len(valid) and not bool(rewards.isnan().any()):
                found.append(Measurement(position, row, float((valid >= success_reward).double().mean())))
        return found

    def record(self, rollout: int, measurements: Iterable[Measurement]) -> None:
        """Add the measurements of a rollout, of all ranks.

        A rollout whose preparation was interrupted comes again, and counts once.
        """
        if rollout <= self._last_recorded:
            return
        found = sorted(measurements)
        for _, row, rate in found:
            self._passes[row] = self._kept * self._passes[row] + rate
            self._counts[row] = self._kept * self._counts[row] + 1
        with self._lock:
            for position in self._measured:
                self._drawn.pop(position, None)
        self._measured = [position for position, _, _ in found]
        self._last_recorded = rollout

    def metrics(self) -> dict[str, float]:
        """Return the shares of prompts that are measured, in the band, and retired."""
        _, in_band, retired = _kinds(self._rates, self._band)
        shares = {"measured": ~self._rates.isnan(), "in_band": in_band, "retired": retired}
        return {f"curriculum/{name}_fraction": float(mask.double().mean()) for name, mask in shares.items()}

    def state_dict(self) -> dict[str, Any]:
        with self._lock:
            drawn = list(self._drawn.items())
        return {
            "passes": self._passes.clone(),
            "counts": self._counts.clone(),
            "last_recorded": self._last_recorded,
            "frozen": self._frozen,
            "drawn": torch.tensor(drawn, dtype=torch.int64).view(-1, 2),
            "measured": list(self._measured),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._passes, self._counts = state["passes"].clone(), state["counts"].clone()
        self._last_recorded, self._frozen = state["last_recorded"], state["frozen"]
        with self._lock:
            self._drawn = dict(state["drawn"].tolist())
        self._measured = list(state.get("measured", ()))

    @property
    def _rates(self) -> Tensor:
        """Pass rate of each row [N]; NaN if it is not measured."""
        return self._passes / self._counts

    def _choose(self, position: int) -> int:
        """Return the row that is drawn for a position by the pass rates of the last sync.

        The P positions of a rollout take P equally spaced points, in a random order, from one random offset: a row
        whose probability is at most 1/P is drawn at most once.
        """
        if self._frozen is None:
            return self._first_order.row_at(position)
        rollout, offset = divmod(position, self._num_prompts)
        generator = torch.Generator().manual_seed(hash((self._seed, _DRAW_KEY, rollout)) % 2**63)
        slot = torch.randperm(self._num_prompts, generator=generator)[offset]
        shift = stream_uniform(self._seed, _DRAW_KEY, rollout)
        point = (slot + shift) / self._num_prompts * self._frozen[-1]
        return int(torch.searchsorted(self._frozen, point, right=True).clamp(max=len(self._frozen) - 1))


def draw_probabilities(
    rates: Tensor, num_prompts: int, *, band: tuple[float, float], exploration: float, replay: float
) -> Tensor:
    """Return the probability of each row in a draw, [N] float64.

    Rows in the band, rows above it, and all others share the draws. A row has at most 1/P, so that none comes twice in
    a rollout, and at most ``MAX_BOOST``/N. What one kind cannot take, the others take in proportion to their limits.

    >>> nan = float("nan")
    >>> draw_probabilities(torch.tensor([0.5, 0.4, 1.0, 0.0, nan]), 2, band=(0.2, 0.8), exploration=0.3, replay=0.1)
    tensor([0.3000, 0.3000, 0.1000, 0.1500, 0.1500], dtype=torch.float64)
    >>> draw_probabilities(torch.tensor([0.5, nan, nan, nan]), 4, band=(0.2, 0.8), exploration=0.3, replay=0.1)
    tensor([0.2500, 0.2500, 0.2500, 0.2500], dtype=torch.float64)

    Args:
        rates: Pass rates [N]; NaN if a row is not measured.
        num_prompts: P, prompts in a rollout.
        band: Lowest and highest pass rate of the rows that are drawn most.
        exploration: Share of rows that are not measured or below the band.
        replay: Share of rows above the band.
    """
    kinds = _kinds(rates, band)
    sizes = kinds.sum(1).double()
    limits = sizes * min(1 / num_prompts, MAX_BOOST / len(rates))
    shares = torch.tensor([exploration, 1 - exploration - replay, replay], dtype=torch.float64).minimum(limits)
    unused = limits - shares if len(rates) >= num_prompts else sizes
    shares += (1 - shares.sum()).clamp(min=0) * unused / unused.sum().clamp(min=1e-12)
    return (kinds * (shares / sizes.clamp(min=1))[:, None]).sum(0)


def _kinds(rates: Tensor, band: tuple[float, float]) -> Tensor:
    """Return which rows are not measured or below the band, in it, and above it, [3, N] bool."""
    low, high = band
    in_band, retired = (rates >= low - _ROUNDING) & (rates <= high + _ROUNDING), rates > high + _ROUNDING
    return torch.stack([~in_band & ~retired, in_band, retired])
