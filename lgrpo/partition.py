"""Assignment of rows to parts of about the same size."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple


class Part(NamedTuple):
    """Some rows, in order, and their size together."""

    rows: list[int]
    size: int


def balanced_parts(sizes: Sequence[int], number: int) -> list[Part]:
    """Assign rows of these sizes to ``number`` parts: from the largest on, each to the smallest part so far.

    >>> balanced_parts([3, 3, 2, 2, 2, 2], 2)
    [Part(rows=[0, 2, 4], size=7), Part(rows=[1, 3, 5], size=7)]
    """
    _check(sizes, number)
    parts: list[list[int]] = [[] for _ in range(number)]
    loads = [(False, 0, part) for part in range(number)]  # empty parts first, then the smallest
    for row in sorted(range(len(sizes)), key=lambda row: -sizes[row]):
        _, load, smallest = heappop(loads)
        parts[smallest].append(row)
        heappush(loads, (True, load + sizes[row], smallest))
    return [Part(sorted(rows), sum(sizes[row] for row in rows)) for rows in parts]


def consecutive_parts(sizes: Sequence[int], number: int, repeated: Sequence[int] | None = None) -> list[Part]:
    """Cut rows of these sizes into ``number`` parts of consecutive rows, so that the largest is as small as possible.

    Args:
        sizes: Size of each row.
        number: Number of parts.
        repeated: Size of each row's prompt if the row before it has the same one, else 0. It is counted only
            for a row that begins a part.

    >>> consecutive_parts([3, 3, 2, 2, 2, 2], 2)
    [Part(rows=[0, 1, 2], size=8), Part(rows=[3, 4, 5], size=6)]
    >>> consecutive_parts([5, 5, 5, 5, 5, 5], 2, repeated=[0, 3, 3, 0, 3, 3])
    [Part(rows=[0, 1, 2], size=9), Part(rows=[3, 4, 5], size=9)]
    """
    _check(sizes, number)
    own = sizes if repeated is None else [size - less for size, less in zip(sizes, repeated, strict=True)]

    def cut(limit: int) -> list[Part]:
        """Return parts of at most this size, as few as possible but at least ``number``."""
        parts: list[Part] = []
        for row, size in enumerate(sizes):
            is_needed = len(sizes) - row <= number - len(parts)  # each part that is left gets one of the rows left
            if row == 0 or is_needed or parts[-1].size + own[row] > limit:
                parts.append(Part([row], size))
            else:
                last = parts[-1]
                last.rows.append(row)
                parts[-1] = Part(last.rows, last.size + own[row])
        return parts

    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(cut(middle)) <= number else (middle + 1, high)
    return cut(low)


def _check(sizes: Sequence[int], number: int) -> None:
    if not 1 <= number <= len(sizes):
        raise ValueError(f"{len(sizes)} rows cannot be cut into {number} parts")
