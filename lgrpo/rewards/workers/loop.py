"""Main loop of a worker process, within limits."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import signal
import sys
import tempfile
from abc import ABC, abstractmethod
from multiprocessing.connection import Connection
from typing import Any

from lgrpo.rewards.base import NotedError
from lgrpo.rewards.workers.supervisor import signal_at_end_of_parent


class WorkerLoop(ABC):
    """Answers the requests that arrive at a worker's pipe until that is closed.

    Requests are pickled; answers are JSON, because what runs in a worker is not trusted.
    """

    def __init__(self, served: Any, pipe: Connection, timeout: float) -> None:
        """
        Args:
            served: Object that the fork server has loaded, such as a reward.
            pipe: Pipe to the trainer.
            timeout: Seconds that a request may take.
        """
        self.served = served
        self.pipe = pipe
        self.timeout = timeout
        self.max_output = 0
        """Size in bytes of what may be printed for a request, and of any file."""
        self._printed = -1
        self._pid = os.getpid()

    @abstractmethod
    def serve(self) -> None:
        """Answer requests. Raises an ``EOFError`` or ``OSError`` when the pipe is closed."""

    def run(self, memory: int, output: int) -> None:
        """Set the limits, in bytes, and answer requests until the pipe is closed."""
        os.setsid()  # the supervisor kills this process group at once, other processes it started a moment later
        signal_at_end_of_parent(signal.SIGKILL)
        self._limit_output(output)
        limit_memory(memory)
        with contextlib.suppress(EOFError, OSError):
            self.serve()

    def answer(self, answer: dict[str, Any]) -> None:
        """Send the answer of a request."""
        if os.getpid() != self._pid:  # the served object forked, and this child shares the pipe
            os._exit(0)
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            os.ftruncate(self._printed, 0)  # the limit counts for each request
        self.pipe.send_bytes(json.dumps(answer).encode())

    def _limit_output(self, num_bytes: int) -> None:
        """Redirect the output to a temporary file and exit when that file, or any other, exceeds ``num_bytes``."""
        self.max_output = num_bytes
        self._printed, name = tempfile.mkstemp()
        os.unlink(name)
        for stream in (1, 2):
            os.dup2(self._printed, stream)
        flags = fcntl.fcntl(self._printed, fcntl.F_GETFL)
        fcntl.fcntl(self._printed, fcntl.F_SETFL, flags | os.O_APPEND)  # truncating it moves the end
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))
        signal.signal(signal.SIGXFSZ, self._exit_at_output_limit)

    def _exit_at_output_limit(self, *_: object) -> None:
        self.pipe.send_bytes(json.dumps({"flood": True}).encode())
        os._exit(1)


def failed(error: BaseException) -> dict[str, Any]:
    """Return an answer with an error."""
    kind = "memory" if isinstance(error, MemoryError) else "errors"
    name = type(error).__name__
    try:
        text = f"{name}: {error}"
    except Exception:  # in its __str__
        text = name
    return {"kind": kind, "error": text[:500], "notes": error.notes if isinstance(error, NotedError) else None}


def address_space() -> int:
    """Return the size of this process's address space in bytes; 0 on other systems than Linux."""
    if sys.platform != "linux":
        return 0
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def limit_memory(num_bytes: int) -> None:
    """Limit the address space to ``num_bytes`` beyond its current size."""
    if in_use := address_space():
        resource.setrlimit(resource.RLIMIT_AS, (in_use + num_bytes, in_use + num_bytes))
