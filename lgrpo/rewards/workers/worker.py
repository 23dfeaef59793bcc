"""Process that loads an object once, such as a reward, and forks workers from itself in milliseconds.

``fork_server.py`` starts it as ``python -m lgrpo.rewards.workers.worker FD``. Socket FD receives the pickled class of
the workers' main loop (``loop.py``) with the object, and then one pipe end per worker to fork. Each answer is the
process id of the new worker's supervisor (``supervisor.py``), which forks the worker and ends all processes that the
worker started; 0 if the system starts no more processes. When the socket is closed, all of them end.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import dill

from lgrpo.rewards.workers.loop import WorkerLoop
from lgrpo.rewards.workers.supervisor import adopt_orphans, end_supervisors, supervise


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer handles Ctrl-C
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps ended supervisors
    adopt_orphans()  # processes of workers whose supervisor was killed
    size, timeout, memory, output = json.loads(channel.recv(1024))
    channel.send(b"k")
    pickled = b""
    while len(pickled) < size:
        if not (received := channel.recv(min(2**20, size - len(pickled)))):  # the trainer has ended
            return
        pickled += received
    try:
        loop, served = dill.loads(pickled)
        channel.send(b"k")
    except BaseException as error:
        channel.send(f"{type(error).__name__}: {error}"[:1000].encode())
        return
    gc.freeze()  # workers share the memory of what is loaded as long as no collection writes to it
    fork_workers(channel, partial(serve_pipe, loop, served, timeout, memory, output))


def fork_workers(channel: socket.socket, serve: partial[None]) -> None:
    """Fork a worker for each pipe that arrives, until the channel is closed."""
    own = os.getpid()
    while True:
        message, files, _, _ = socket.recv_fds(channel, 1, 1)
        if not message:  # the trainer has closed the channel, or has ended
            end_supervisors()
            return
        try:
            pid = os.fork()
        except OSError:
            pid = -1
        if pid == 0:
            channel.close()
            supervise(partial(serve, files[0]), own, files[0])
            os._exit(0)
        os.close(files[0])
        channel.send(str(max(0, pid)).encode())


def serve_pipe(loop: type[WorkerLoop], served: Any, timeout: float, memory: int, output: int, descriptor: int) -> None:
    """Answer the requests that arrive at a pipe until it is closed, within limits."""
    loop(served, Connection(descriptor), timeout).run(memory, output)


if __name__ == "__main__":
    main()
