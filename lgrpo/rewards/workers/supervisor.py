"""Parent of one worker, which ends all processes that the worker started.

A worker's code may fork and call ``setsid``: its processes are then in no process group that could be signalled, and
without a parent once the worker has ended. On Linux the supervisor adopts them (``PR_SET_CHILD_SUBREAPER``), so they
are its children when it ends them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable

from lgrpo.rewards.code import confinement, sandbox

_GRACE = 3.0  # seconds in which a process that was orphaned cleans up: a sandbox removes its folder
_GIVE_UP = 60.0  # seconds after which processes that fork faster than they are killed are left
_LINUX = sys.platform == "linux"


def supervise(work: Callable[[], None], parent: int, descriptor: int) -> None:
    """Run ``work`` in a child process. When that ends, or at SIGTERM, end all processes that it started, and return.

    Args:
        work: Function to run.
        parent: Process id of this process's parent; SIGTERM is also sent when it ends.
        descriptor: File descriptor for the child alone.
    """
    awaited = {signal.SIGTERM, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    for number in awaited:
        signal.signal(number, signal.SIG_DFL)
    os.setsid()  # no signal to the trainer's process group reaches this process
    adopt_orphans()
    signal_at_end_of_parent(signal.SIGTERM)
    if os.getppid() != parent:  # it ended before the call above
        return
    worker = os.fork()
    if worker == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, awaited)
        work()
        os._exit(0)
    os.close(descriptor)
    while signal.sigwait(awaited) == signal.SIGCHLD and worker not in ended_children():
        pass  # an adopted process has ended
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(worker, signal.SIGKILL)
    end_children(_GRACE)


def end_children(grace: float) -> None:
    """Wait until all children of this process have ended, adopted ones included; kill those left after ``grace``."""
    start = time.monotonic()
    while has_children() and (elapsed := time.monotonic() - start) < _GIVE_UP:
        if elapsed >= grace:
            for pid in children():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def end_supervisors() -> None:
    """End the supervisors that this process forked, their workers, and all processes that these started."""
    for pid in children():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGTERM)
    end_children(_GRACE + 2.0)


def ended_children() -> set[int]:
    """Return the ids of children that have ended since the last call."""
    ended = set()
    with contextlib.suppress(ChildProcessError):
        while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
            ended.add(pid)
    return ended


def has_children() -> bool:
    """Return whether a child of this process has not ended."""
    ended_children()
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:  # there is none
        return False
    return True


def children() -> list[int]:
    """Return the ids of this process's children, adopted ones included; on other systems than Linux none."""
    if not _LINUX:
        return []
    return sandbox.children()


def adopt_orphans() -> None:
    """Become the parent of all descendants whose parents end, on Linux."""
    if _LINUX:
        confinement.prctl(confinement.PR_SET_CHILD_SUBREAPER, 1)


def signal_at_end_of_parent(number: int) -> None:
    """Have the kernel send this process a signal when its parent ends, on Linux."""
    if _LINUX:
        confinement.prctl(confinement.PR_SET_PDEATHSIG, number)
