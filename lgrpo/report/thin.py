"""Curves and tables made small enough for a page, without hiding anything."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

Points = Sequence[tuple[int, float]]


def thin_points(points: Points, most: int) -> list[tuple[int, float]]:
    """At most so many of the points themselves: of every bucket of steps the lowest and the highest, so spikes stay.

    Nothing is averaged; the first and the last point are kept.

    >>> thin_points([(0, 1.0), (1, 9.0), (2, 1.0), (3, 2.0), (4, 0.0), (5, 1.0)], 4)
    [(0, 1.0), (1, 9.0), (4, 0.0), (5, 1.0)]
    """
    if len(points) <= most:
        return list(points)
    inner, num_buckets = points[1:-1], max(1, (most - 2) // 2)
    kept = [points[0]]
    for bucket in range(num_buckets):
        piece = inner[bucket * len(inner) // num_buckets : (bucket + 1) * len(inner) // num_buckets]
        finite = [point for point in piece if math.isfinite(point[1])]
        if finite:
            extremes = {min(finite, key=lambda p: p[1]), max(finite, key=lambda p: p[1])}
            kept += sorted(extremes)
    return [*kept, points[-1]]


def smooth_points(points: Points, window: int) -> list[tuple[int, float]]:
    """Mean of each value with those shortly before it.

    >>> smooth_points([(0, 1.0), (1, 2.0), (2, 6.0)], 2)
    [(0, 1.0), (1, 1.5), (2, 4.0)]
    """
    kept, total = [], 0.0
    finite = [(step, value) for step, value in points if math.isfinite(value)]
    for i, (step, value) in enumerate(finite):
        total += value - (finite[i - window][1] if i >= window else 0.0)
        kept.append((step, total / min(i + 1, window)))
    return kept


def thin_rollouts(rows: list[dict[str, Any]], most_rows: int, most_characters: int) -> list[dict[str, Any]]:
    """Whole rollouts, evenly spread over the run, the last one included."""
    characters = sum(len(str(row.get("prompt"))) + len(str(row.get("completion"))) for row in rows)
    every = math.ceil(max(len(rows) / most_rows, characters / most_characters, 1))
    rollouts = sorted({row["rollout"] for row in rows}, reverse=True)
    chosen = set(rollouts[::every])
    return [row for row in rows if row["rollout"] in chosen]
