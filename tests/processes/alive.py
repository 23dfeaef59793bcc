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


def running():
    """Return pid, ")", state, parent, group and further fields of every process that has not ended."""
    fields = [[s.split()[0], *s[s.rindex(")") :].split()] for s in process_stats()]
    return [stat for stat in fields if stat[2] not in "ZX"]


def is_running(pid):
    return any(int(stat[0]) == pid for stat in running())


def child_of(pid):
    """Return the process id of the only child of a process."""
    (child,) = (int(stat[0]) for stat in running() if int(stat[3]) == pid)
    return child


def until_all_ended(matches, seconds=20):
    """Return whether every process for which ``matches(stat)`` holds has ended, waiting up to ``seconds``."""
    for _ in range(seconds * 10):
        if not any(matches(stat) for stat in running()):
            return True
        time.sleep(0.1)
    return False
