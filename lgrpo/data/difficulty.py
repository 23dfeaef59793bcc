"""Weights by which training rows are drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(kw_only=True, frozen=True)
class DifficultySampling:
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
