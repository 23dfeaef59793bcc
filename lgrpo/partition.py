"""Cutting of rows into parts of about the same size."""

from __future__ import annotations

from collections.abc import Sequence


def consecutive_parts(sizes: Sequence[int], number: int) -> list[list[int]]:
    """Cut rows of these sizes into ``number`` parts of consecutive rows, so that the largest is as small as possible.

    >>> consecutive_parts([3, 3, 2, 2, 2, 2], 2)
    [[0, 1, 2], [3, 4, 5]]
    """
    if not 1 <= number <= len(sizes):
        raise ValueError(f"{len(sizes)} rows cannot be cut into {number} parts")

    def cut(limit: int) -> list[list[int]]:
        """Return parts of at most this size, as few as possible but at least ``number``."""
        parts: list[list[int]] = []
        total = 0
        for row, size in enumerate(sizes):
            is_needed = len(sizes) - row <= number - len(parts)  # each part that is left gets one of the rows left
            if row == 0 or is_needed or total + size > limit:
                parts.append([])
                total = 0
            parts[-1].append(row)
            total += size
        return parts

    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(cut(middle)) <= number else (middle + 1, high)
    return cut(low)
