"""Looking at the machine's processes."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path


def process_stats():
    """Of every process its /proc/…/stat; one that ends meanwhile is left out."""
    stats = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            stats.append(path.read_text())
    return stats


def until_nobody_lives(wanted, seconds=20):
    """Waits until no process is left that ``wanted`` (of its /proc/…/stat) and that is no zombie."""
    for _ in range(seconds * 10):
        # pid, ")", state, parent, group
        fields = [[s.split()[0], *s[s.rindex(")") :].split()] for s in process_stats()]
        if not any(wanted(stat) and stat[2] not in "ZX" for stat in fields):
            return True
        time.sleep(0.1)
    return False
