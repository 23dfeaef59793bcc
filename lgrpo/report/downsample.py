"""Curves and tables reduced to a size that a page can show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

Points = Sequence[tuple[int, float]]
"""(optimizer step, value) pairs in the order of steps."""


def downsample_points(points: Points, max_points: int) -> list[tuple[int, float]]:
    """Return at most ``max_points`` of the points: the lowest and the highest of each bucket of steps.

    Spikes are kept and nothing is averaged; the first and the last point are kept.

    >>> downsample_points([(0, 1.0), (1, 9.0), (2, 1.0), (3, 2.0), (4, 0.0), (5, 1.0)], 4)
    [(0, 1.0), (1, 9.0), (4, 0.0), (5, 1.0)]
    """
    if len(points) <= max_points:
        return list(points)
    inner, num_buckets = points[1:-1], max(1, (max_points - 2) // 2)
    kept = [points[0]]
    for bucket in range(num_buckets):
        piece = inner[bucket * len(inner) // num_buckets : (bucket + 1) * len(inner) // num_buckets]
        finite = [point for point in piece if math.isfinite(point[1])]
        if finite:
            extremes = {min(finite, key=lambda p: p[1]), max(finite, key=lambda p: p[1])}
            kept += sorted(extremes)
    return [*kept, points[-1]]


def thin_points(points: Points, max_points: int) -> list[tuple[int, float]]:
    """Return at most ``max_points`` of the points at equal distances, the last one included.

    >>> thin_points([(0, 1.0), (1, 3.0), (2, 5.0), (3, 6.0), (4, 7.0)], 3)
    [(0, 1.0), (2, 5.0), (4, 7.0)]
    """
    every = math.ceil(len(points) / max_points)
    return list(points[::-1][::every][::-1]) if every > 1 else list(points)


def smooth_points(points: Points, window: int) -> list[tuple[int, float]]:
    """Return the mean of each value and the ``window - 1`` values before it, without non-finite values.

    >>> smooth_points([(0, 1.0), (1, 2.0), (2, 6.0)], 2)
    [(0, 1.0), (1, 1.5), (2, 4.0)]
    """
    kept, total = [], 0.0
    finite = [(step, value) for step, value in points if math.isfinite(value)]
    for i, (step, value) in enumerate(finite):
        total += value - (finite[i - window][1] if i >= window else 0.0)
        kept.append((step, total / min(i + 1, window)))
    return kept


def downsample_rollouts(rows: list[dict[str, Any]], max_rows: int, max_characters: int) -> list[dict[str, Any]]:
    """Return the rows of every n-th rollout, the last one included, with the smallest n that meets both limits."""
    texts = ("prompt", "completion", "notes")
    characters = sum(len(str(row.get(name))) for row in rows for name in texts)
    every = math.ceil(max(len(rows) / max_rows, characters / max_characters, 1))
    rollouts = sorted({row["rollout"] for row in rows}, reverse=True)
    chosen = set(rollouts[::every])
    return [row for row in rows if row["rollout"] in chosen]
