"""A process that has a reward loaded and forks workers from itself, so that a new one costs milliseconds.

Run as ``python -m lgrpo.rewards.nursery FD``: over the socket FD come the reward, pickled, and then, for each worker
wanted, the end of a pipe it shall serve. Back goes the worker's process id.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import sys
from multiprocessing.connection import Connection

import dill

from lgrpo.rewards.base import BatchReward, checked_rewards


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the trainer to deal with
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries the dead
    size, memory = json.loads(channel.recv(1024))
    channel.send(b"k")
    pickled = b""
    while len(pickled) < size:
        pickled += channel.recv(min(2**20, size - len(pickled)))
    try:
        reward = dill.loads(pickled)
        channel.send(b"k")
    except BaseException as error:
        channel.send(f"{type(error).__name__}: {error}"[:1000].encode())
        return
    while True:
        message, files, _, _ = socket.recv_fds(channel, 1, 1)
        if not message:  # the trainer is gone
            return
        if pid := os.fork():
            os.close(files[0])
            channel.send(str(pid).encode())
        else:
            channel.close()
            serve(reward, Connection(files[0]), memory)
            os._exit(0)


def serve(reward: BatchReward, pipe: Connection, memory: int) -> None:
    """Scores one completion after another until the pipe closes."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()  # whatever it starts is killed with it
    limit_memory(memory)
    with contextlib.suppress(EOFError, OSError):
        while True:
            prompt, completion = pipe.recv()
            answer: dict[str, float | str]
            try:
                answer = {"score": checked_rewards(reward, [prompt], [completion])[0]}
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"[:500]}
            pipe.send_bytes(json.dumps(answer).encode())


def limit_memory(num_bytes: int) -> None:
    """So many bytes more than are in use now."""
    if sys.platform == "linux":
        with open("/proc/self/statm") as file:
            in_use = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use + num_bytes, in_use + num_bytes))


if __name__ == "__main__":
    main()
