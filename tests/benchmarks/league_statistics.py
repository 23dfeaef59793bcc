"""Tests and power of differences between methods that are paired by seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

from lgrpo.report.intervals import t_probability, t_quantile

Key = TypeVar("Key", bound=Hashable)

LEVEL, POWER = 0.05, 0.8


def paired_p_value(differences: Sequence[float]) -> float:
    """Return the p-value of the two-sided paired t-test; 1 if all differences are 0.

    >>> round(paired_p_value([1.0, 2.0, 3.0, 4.0]), 4)  # t = 3.873 with three degrees of freedom
    0.0305
    """
    mean, deviation = statistics.fmean(differences), statistics.stdev(differences)
    if deviation == 0:
        return float(mean == 0)
    return 1 - t_probability(abs(mean) / deviation * math.sqrt(len(differences)), len(differences) - 1)


def holm(p_values: Mapping[Key, float], planned: int) -> dict[Key, float]:
    """Return p-values adjusted by Holm's method for a number of planned comparisons; missing ones count as p = 1.

    >>> holm({"a": 0.01, "b": 0.04, "c": 0.03}, planned=3)
    {'a': 0.03, 'c': 0.06, 'b': 0.06}
    """
    adjusted: dict[Key, float] = {}
    largest = 0.0
    for rank, (key, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        largest = max(largest, min(1.0, (planned - rank) * p))
        adjusted[key] = largest
    return adjusted


def power(effect: float, count: int, level: float) -> float:
    """Return the power of the two-sided paired t-test for a mean of ``effect`` standard deviations.

    The noncentral t-distribution is integrated over the sample's standard deviation.

    >>> round(power(1.0, count=10, level=0.05), 3)
    0.803
    """
    degrees, critical, shift = count - 1, t_quantile(1 - level, count - 1), effect * math.sqrt(count)
    normal = statistics.NormalDist()
    log_constant = math.log(2) + degrees / 2 * math.log(degrees / 2) - math.lgamma(degrees / 2)
    steps, total = 2000, 0.0
    for step in range(1, steps):
        ratio = step * 4 / steps  # sample standard deviation over the true one; beyond 4 its density is 0
        density = math.exp(log_constant + (degrees - 1) * math.log(ratio) - degrees * ratio**2 / 2)
        total += density * (normal.cdf(shift - critical * ratio) + normal.cdf(-shift - critical * ratio))
    return total * 4 / steps


def detectable_effect(count: int, level: float, wanted: float = POWER) -> float:
    """Return the smallest mean, in standard deviations of a difference, that is detected with this power.

    >>> round(detectable_effect(count=10, level=0.05), 3)
    0.996
    """
    low, high = 0.0, 100.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if power(middle, count, level) < wanted else (low, middle)
    return high


def pooled_deviation(samples: Sequence[Sequence[float]]) -> float:
    """Return the standard deviation within samples, pooled over them.

    >>> pooled_deviation([[0.0, 2.0], [5.0, 5.0]])
    1.0
    """
    squares = sum(statistics.variance(sample) * (len(sample) - 1) for sample in samples)
    return math.sqrt(squares / sum(len(sample) - 1 for sample in samples))
