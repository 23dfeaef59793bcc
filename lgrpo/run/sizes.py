"""Sizes of files and of memory, for messages."""

from __future__ import annotations


def format_bytes(num_bytes: float) -> str:
    """Return a size with its unit.

    >>> format_bytes(3 * 2**29)
    '1.5 GiB'
    """
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
