"""Inspect the processes of this machine."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path


def process_stats():
    """Return the contents of ``/proc/PID/stat`` of every process that is still running."""
    stats = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            stats.append(path.read_text())
    return stats


def until_all_ended(matches, seconds=20):
    """Return whether every process for which ``matches(stat)`` holds has ended, waiting up to ``seconds``."""
    for _ in range(seconds * 10):
        # pid, ")", state, parent, group
        fields = [[s.split()[0], *s[s.rindex(")") :].split()] for s in process_stats()]
        if not any(matches(stat) and stat[2] not in "ZX" for stat in fields):
            return True
        time.sleep(0.1)
    return False
