"""Confidence intervals of means over seeds (Student's t), and differences paired by seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lgrpo.checks import check_range


@dataclass(kw_only=True, frozen=True)
class Interval:
    """A mean with its confidence interval."""

    mean: float
    half_width: float
    """Half the width of the confidence interval; NaN for a single value."""
    count: int

    def __str__(self) -> str:
        return f"{self.mean:.4f} ± {self.half_width:.4f}" if self.count > 1 else f"{self.mean:.4f}"


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Return the mean of independent values with its t-interval.

    >>> print(mean_interval([0.5, 0.6, 0.7]))
    0.6000 ± 0.2484
    """
    if not values:
        raise ValueError("a mean requires at least one value")
    mean, count = statistics.fmean(values), len(values)
    if count == 1:
        return Interval(mean=mean, half_width=math.nan, count=1)
    error = statistics.stdev(values) / math.sqrt(count)
    return Interval(mean=mean, half_width=t_quantile(confidence, count - 1) * error, count=count)


def paired_difference(
    values: Mapping[int, float], baseline: Mapping[int, float], confidence: float = 0.95
) -> Interval | None:
    """Return the mean difference of two arms over the seeds they share; None if they share none.

    Effects of a seed on both arms cancel, so the difference can be significant although the two intervals overlap.

    >>> print(paired_difference({0: 0.6, 1: 0.8}, {0: 0.5, 1: 0.69, 2: 0.9}))
    0.1050 ± 0.0635
    """
    shared = sorted(values.keys() & baseline.keys())
    return mean_interval([values[seed] - baseline[seed] for seed in shared], confidence) if shared else None


def t_quantile(confidence: float, degrees: int) -> float:
    """Return t such that P(abs(T) < t) = ``confidence`` for Student's distribution.

    >>> [round(t_quantile(0.95, degrees), 3) for degrees in (1, 2, 4, 9, 100)]
    [12.706, 4.303, 2.776, 2.262, 1.984]
    """
    check_range("confidence", confidence, above=0, below=1)
    low, high = 0.0, 1.0
    while t_probability(high, degrees) < confidence:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if t_probability(middle, degrees) < confidence else (low, middle)
    return high


def t_probability(t: float, degrees: int) -> float:
    """Return P(abs(T) < t) for Student's distribution with integer degrees of freedom, by finite sums.

    >>> round(t_probability(2.262, 9), 3)
    0.95
    """
    angle = math.atan(t / math.sqrt(degrees))
    sine, square = math.sin(angle), math.cos(angle) ** 2
    term = 1.0 if degrees % 2 == 0 else math.cos(angle)
    total = 0.0
    for k in range(2 if degrees % 2 == 0 else 3, degrees + 1, 2):
        total += term
        term *= square * (k - 1) / k
    return sine * total if degrees % 2 == 0 else 2 / math.pi * (angle + sine * total)
