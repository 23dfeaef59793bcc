"""How often training rows are drawn: by a field of the row, or by the pass rates measured so far."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from lgrpo.checks import check_range
from lgrpo.data.curriculum import Curriculum
from lgrpo.data.order import Order, Weighted
from lgrpo.engines import RolloutEngine


class Difficulty(ABC):
    """Settings that decide how often each training row is drawn.

    The data module calls ``check`` first. ``row_weights`` then selects rows, and ``order`` gives them positions.
    """

    @abstractmethod
    def check(self, engine: RolloutEngine, has_dynamic_sampling: bool) -> None:
        """Raise an error if the settings are invalid, or do not work with others."""

    def row_weights(self, rows: Sequence[Mapping[str, Any]]) -> list[float]:
        """Return the weight of each row. A row of weight 0 is never drawn."""
        return [1.0] * len(rows)

    @abstractmethod
    def order(self, weights: Sequence[float], seed: int, num_prompts: int) -> Order:
        """Return the order of the rows that can be drawn.

        Args:
            weights: Their weights, all above 0.
            seed: Seed of the draws.
            num_prompts: P, prompts in a rollout.
        """


@final
@dataclass(kw_only=True, frozen=True)
class DifficultySampling(Difficulty):
    """Drawing of training rows with a probability proportional to a weight, instead of once in every pass."""

    field: str
    """Field of the row that holds its difficulty, or any other value to weight by."""
    weights: dict[str, float]
    """Weights by value of the field, written as text. A row of weight 0 is never drawn."""
    rest: float = 0.0
    """Weight of rows with any other value."""

    def __post_init__(self) -> None:
        weights = {str(value): weight for value, weight in self.weights.items()}  # YAML reads keys as numbers
        object.__setattr__(self, "weights", weights)

    def check(self, engine: RolloutEngine, has_dynamic_sampling: bool) -> None:
        for name, weight in {**self.weights, "rest": self.rest}.items():
            if not (weight >= 0 and math.isfinite(weight)):
                raise ValueError(f"difficulty: the weight of {name} is {weight}; it must be finite and at least 0")

    def weight(self, row: Mapping[str, Any]) -> float:
        """Return the weight of a row.

        >>> DifficultySampling(field="level", weights={"5": 2.0}, rest=1.0).weight({"level": 5})
        2.0
        """
        if self.field not in row:
            raise ValueError(f"difficulty.field is {self.field!r}, but the row has only {sorted(row)}")
        return self.weights.get(str(row[self.field]), self.rest)

    def row_weights(self, rows: Sequence[Mapping[str, Any]]) -> list[float]:
        found = []
        for index, row in enumerate(rows):
            try:
                found.append(self.weight(row))
            except ValueError as error:
                raise ValueError(f"row {index} of the train set: {error}") from error
        if not any(found):
            values = sorted({str(row[self.field]) for row in rows})[:20]
            raise ValueError(
                f"no row of the train set has a weight in data.difficulty: {self.field} is one of {values}, the "
                f"weights are for {sorted(self.weights)}"
            )
        return found

    def order(self, weights: Sequence[float], seed: int, num_prompts: int) -> Order:
        return Weighted(weights, seed)


@final
@dataclass(kw_only=True, frozen=True)
class Measured(Difficulty):
    """Drawing of training prompts by their pass rates in the rollouts so far: mostly those in a band.

    A completion passes if its reward is at least ``data.evaluation.success_reward``. Pass rates are those known at the
    last sync. A prompt comes at most once in a rollout and eight times as often as it would without a curriculum; if
    too few prompts are in the band, others come instead. Until something is measured, prompts come as without one.
    """

    band: tuple[float, float] = (0.1, 0.9)
    """Lowest and highest pass rate of prompts that are drawn most."""
    exploration: float = 0.25
    """Share of draws for prompts that are not measured yet or below the band."""
    replay: float = 0.05
    """Share of draws for retired prompts, those above the band."""
    forgetting: float = 0.5
    """Share by which a new measurement of a prompt lowers the weight of its earlier ones; 0 averages all of them."""

    def check(self, engine: RolloutEngine, has_dynamic_sampling: bool) -> None:
        low, high = self.band
        if not 0 <= low <= high <= 1:
            raise ValueError(
                f"data.difficulty.band is {list(self.band)}; it must be two pass rates between 0 and 1, the lower first"
            )
        for name in ("exploration", "replay", "forgetting"):
            check_range(f"data.difficulty.{name}", getattr(self, name), at_least=0, at_most=1)
        if self.exploration + self.replay > 1:
            raise ValueError(
                f"data.difficulty.exploration is {self.exploration} and replay {self.replay}: these shares of "
                "the draws are more than 1 together"
            )
        if has_dynamic_sampling:
            raise ValueError(
                "data.difficulty is Measured and data.dynamic_sampling is set: groups that are replaced would not be "
                "measured, and their prompts drawn again. Set one of them"
            )
        if engine.replays:
            raise ValueError(
                f"data.difficulty is Measured, but {type(engine).__name__} takes completions from a recording, whose "
                "pass rates are not those of the policy: remove one of the two"
            )

    def order(self, weights: Sequence[float], seed: int, num_prompts: int) -> Order:
        return Curriculum(
            len(weights),
            seed,
            num_prompts,
            band=self.band,
            exploration=self.exploration,
            replay=self.replay,
            forgetting=self.forgetting,
        )
