"""Process that loads a reward once and forks workers from itself, so that a new worker takes milliseconds.

``fork_server.py`` starts it as ``python -m lgrpo.rewards.workers.worker FD``. Socket FD receives the pickled reward and
then one pipe end per worker to fork. Each answer is the process id of the new worker's supervisor
(``supervisor.py``), which forks the worker and ends all processes that the worker started. When the socket is closed,
all of them end.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import resource
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import dill

from lgrpo.rewards.base import NOT_YET, AsyncReward, BatchReward, Score, checked_rewards, checked_score
from lgrpo.rewards.workers.supervisor import adopt_orphans, end_supervisors, signal_at_end_of_parent, supervise
from lgrpo.types import Completion, Prompt


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer handles Ctrl-C
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps ended supervisors
    adopt_orphans()  # processes of rewards whose supervisor was killed
    size, timeout, memory, output = json.loads(channel.recv(1024))
    channel.send(b"k")
    pickled = b""
    while len(pickled) < size:
        if not (received := channel.recv(min(2**20, size - len(pickled)))):  # the trainer has ended
            return
        pickled += received
    try:
        reward = dill.loads(pickled)
        channel.send(b"k")
    except BaseException as error:
        channel.send(f"{type(error).__name__}: {error}"[:1000].encode())
        return
    own = os.getpid()
    while True:
        message, files, _, _ = socket.recv_fds(channel, 1, 1)
        if not message:  # the trainer has closed the channel, or has ended
            end_supervisors()
            return
        if pid := os.fork():
            os.close(files[0])
            channel.send(str(pid).encode())
        else:
            channel.close()
            supervise(partial(score_jobs, reward, files[0], timeout, memory, output), own, files[0])
            os._exit(0)


def score_jobs(reward: BatchReward, descriptor: int, timeout: float, memory: int, output: int) -> None:
    """Score the jobs that arrive at a pipe until it is closed, within limits."""
    WorkerLoop(reward, Connection(descriptor), timeout).run(memory, output)


class WorkerLoop:
    """Main loop of a worker: scores the jobs it receives until its pipe is closed."""

    def __init__(self, reward: BatchReward, pipe: Connection, timeout: float) -> None:
        self.reward = reward
        self.pipe = pipe
        self.timeout = timeout
        self._printed = -1
        self._pid = os.getpid()

    def run(self, memory: int, output: int) -> None:
        os.setsid()  # the supervisor kills this process group at once, other processes of the reward a moment later
        signal_at_end_of_parent(signal.SIGKILL)
        self._limit_output(output)
        limit_memory(memory)
        with contextlib.suppress(EOFError, OSError):
            if isinstance(self.reward, AsyncReward):
                asyncio.run(self._serve_concurrently(self.reward))
            else:
                self._serve_one_by_one()

    def _serve_one_by_one(self) -> None:
        while True:
            job, prompts, completions = self.pipe.recv()
            try:
                answer = scored(checked_rewards(self.reward, prompts, completions))
            except Exception as error:
                answer = failed(error)
            self._answer(job, answer)

    async def _serve_concurrently(self, reward: AsyncReward) -> None:
        loop, running = asyncio.get_running_loop(), set()
        while True:
            job = await loop.run_in_executor(None, self.pipe.recv)
            task = asyncio.create_task(self._score(reward, *job))
            running.add(task)
            task.add_done_callback(running.discard)

    async def _score(
        self, reward: AsyncReward, job: int, prompts: Sequence[Prompt], completions: Sequence[Completion]
    ) -> None:
        (prompt,), (completion,) = prompts, completions
        try:
            value = await asyncio.wait_for(reward.score_with_retries(prompt, completion), self.timeout)
            answer = scored([checked_score(type(reward).__name__, value, prompt, completion)])
        except TimeoutError:
            answer = {"kind": "timeouts", "error": f"a score took longer than {self.timeout:g} s"}
        except Exception as error:
            answer = failed(error)
        self._answer(job, answer)

    def _answer(self, job: int, answer: dict[str, Any]) -> None:
        if os.getpid() != self._pid:  # the reward forked, and this child shares the pipe
            os._exit(0)
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            os.ftruncate(self._printed, 0)  # the limit counts for each score
        self.pipe.send_bytes(json.dumps({"job": job} | answer).encode())

    def _limit_output(self, num_bytes: int) -> None:
        """Redirect the output to a temporary file and exit when that file, or any other, exceeds ``num_bytes``."""
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


def scored(scores: Sequence[Score]) -> dict[str, Any]:
    """Return an answer with scores."""
    return {"scores": [None if score is NOT_YET else score for score in scores]}


def failed(error: Exception) -> dict[str, Any]:
    """Return an answer with an error."""
    kind = "memory" if isinstance(error, MemoryError) else "errors"
    return {"kind": kind, "error": f"{type(error).__name__}: {error}"[:500]}


def limit_memory(num_bytes: int) -> None:
    """Limit the address space to ``num_bytes`` beyond its current size."""
    if sys.platform == "linux":
        with open("/proc/self/statm") as file:
            in_use = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use + num_bytes, in_use + num_bytes))


if __name__ == "__main__":
    main()
