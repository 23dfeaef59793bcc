"""Looking at the machine's processes."""

from __future__ import annotations

import time
from pathlib import Path


def until_nobody_lives(wanted, seconds=20):
    """Waits until no process is left that ``wanted`` (of its /proc/…/stat) and that is no zombie."""
    for _ in range(seconds * 10):
        stats = [path.read_text() for path in Path("/proc").glob("[0-9]*/stat") if path.exists()]
        fields = [[s.split()[0], *s[s.rindex(")") :].split()] for s in stats]  # pid, ")", state, parent, group
        if not any(wanted(stat) and stat[2] not in "ZX" for stat in fields):
            return True
        time.sleep(0.1)
    return False
