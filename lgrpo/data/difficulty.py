"""Which training rows are drawn more often than others."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(kw_only=True, frozen=True)
class DifficultySampling:
    """Training rows are drawn with a probability proportional to a weight, instead of once in every pass."""

    field: str
    """Field of the row that says how difficult it is, or anything else that weights can be given by."""
    weights: dict[str, float]
    """Weight of the rows that have this value in the field, written as text. A row of weight 0 is never drawn."""
    rest: float = 0.0
    """Weight of the rows that have any other value."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", {str(value): weight for value, weight in self.weights.items()})  # YAML's 1
        for name, weight in {**self.weights, "rest": self.rest}.items():
            if not (weight >= 0 and math.isfinite(weight)):
                raise ValueError(f"difficulty: the weight of {name} is {weight}; it is a number, 0 or more")

    def weight(self, row: Mapping[str, Any]) -> float:
        """Weight of a row.

        >>> DifficultySampling(field="level", weights={"5": 2.0}, rest=1.0).weight({"level": 5})
        2.0

        Raises:
            ValueError: the row does not have the field.
        """
        if self.field not in row:
            raise ValueError(f"difficulty.field is {self.field!r}, but the row has only {sorted(row)}")
        return self.weights.get(str(row[self.field]), self.rest)
