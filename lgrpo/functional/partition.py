"""Cutting of rows into parts of about the same size."""

from __future__ import annotations

from collections.abc import Sequence


def grouped_parts(sizes: Sequence[int], groups: Sequence[int], shared: Sequence[int], number: int) -> list[list[int]]:
    """Cut rows into ``number`` parts of consecutive rows, so that the largest part is as small as possible.

    Args:
        sizes: Size of each row alone.
        groups: Number of each row's group; rows of a group follow one another.
        shared: What the first row of a group in a part adds to its own size, such as a prompt that is read once.
        number: Number of parts; each has at least one row.

    >>> grouped_parts([2, 2, 2, 2, 2, 2], [0, 0, 1, 1, 1, 1], [9, 9, 5, 5, 5, 5], 2)
    [[0, 1], [2, 3, 4, 5]]
    """
    if not 1 <= number <= len(sizes):
        raise ValueError(f"{len(sizes)} rows cannot be cut into {number} parts")

    def cut(limit: int) -> list[list[int]]:
        """Return parts of at most this size, as few as possible but at least ``number``."""
        parts: list[list[int]] = []
        size = 0
        for row, (own, group) in enumerate(zip(sizes, groups, strict=True)):
            is_needed = len(sizes) - row <= number - len(parts)  # each part that is left gets one of the rows left
            begins = row == 0 or groups[row - 1] != group
            added = own + (shared[row] if begins else 0)
            if row == 0 or is_needed or size + added > limit:
                parts.append([])
                size, added = 0, own + shared[row]
            parts[-1].append(row)
            size += added
        return parts

    low = max(own + prompt for own, prompt in zip(sizes, shared, strict=True))
    high = sum(sizes) + sum(shared)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(cut(middle)) <= number else (middle + 1, high)
    return cut(low)
