"""The trainer's end of the pipe to a worker process."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from lgrpo.engines.base import RolloutEngine
from lgrpo.engines.pool.cuda_buffers import ReceiverCache, StagedChunk
from lgrpo.engines.processes import END_WITH_TRAINER, kill_process, log_excerpt, start_process
from lgrpo.engines.recovery import EngineError, EngineFailure

_WORKER = f"""
import os, shutil, signal, sys  # before the slow imports, because the trainer may end meanwhile
signal.signal(signal.SIGTERM, lambda *_: (shutil.rmtree(os.path.dirname(sys.argv[2]), True), os._exit(0)))
{END_WITH_TRAINER}
from lgrpo.engines.pool.worker import main
main()
"""


class _Watchdog(threading.Thread):
    """Checks twice a second whether a message exceeds its deadline, and then kills the worker."""

    def __init__(self, kill: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self.deadline = math.inf
        self.has_expired = False
        self.stopped = threading.Event()
        self._kill = kill
        self.start()

    def run(self) -> None:
        while not self.stopped.wait(0.5):
            if time.monotonic() > self.deadline:
                self.deadline, self.has_expired = math.inf, True
                self._kill()


class WorkerProcess:
    """A worker process, as the trainer sees it. Every method that waits has a time limit.

    ``request`` starts a request and ``answer`` waits for its result; ``call`` does both. A worker that exceeds a time
    limit or exits raises an ``EngineFailure``, and must be closed.
    """

    def __init__(self, engine: RolloutEngine, folder: Path, environment: dict[str, str]) -> None:
        """Start a process for an engine, which must be picklable. ``folder`` is deleted when the process ends."""
        self.folder = folder
        self.log = folder / "log"
        self.connection, remote = Pipe()
        self._urgent, urgent = Pipe()
        self._urgent_lock = threading.Lock()
        self._is_busy = False
        self._is_cancelled = False
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._cache: ReceiverCache = {}
        program = _WORKER.format(trainer=os.getpid())
        with self.log.open("w") as log:
            self.process: subprocess.Popen = start_process(
                [sys.executable, "-c", program, str(remote.fileno()), str(folder), str(urgent.fileno())],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                pass_fds=(remote.fileno(), urgent.fileno()),
            )
        remote.close()
        urgent.close()
        self._watchdog = _Watchdog(self.kill)
        try:
            self.send(engine, timeout=60)
        except BaseException as error:
            self.close()
            if isinstance(error, pickle.PicklingError | TypeError | AttributeError):
                raise EngineError(f"a {type(engine).__name__} cannot be sent to another process: {error}") from error
            raise

    @property
    def is_alive(self) -> bool:
        """Whether the process is running."""
        return self.process.poll() is None

    def call(self, name: str, *arguments: Any, timeout: float) -> Any:
        """Send a request, and return its answer."""
        self.request(name, *arguments, timeout=timeout)
        return self.answer(timeout)

    def call_urgently(self, name: str, *arguments: Any, timeout: float) -> Any:
        """Send a request that is served even during a generation, from any thread, and return its answer."""
        deadline = time.monotonic() + timeout
        with self._urgent_lock:
            try:
                self._urgent.send((name, arguments))
                while not self._urgent.poll():
                    if time.monotonic() > deadline:
                        self.kill()  # a late answer would be taken for that of the next request
                        raise EngineFailure(f"a process of the pool did not answer for {timeout:g} s")
                    # if nobody reads the other pipe, the worker may wait to send, and serves nothing
                    unread = [self.connection] if self._is_cancelled else []
                    if self.connection in wait([self._urgent, *unread], 1):  # another thread may cancel meanwhile
                        self._discard(timeout)
                kind, content = self._urgent.recv()
            except (EOFError, OSError) as error:
                raise EngineFailure(f"a process of the pool ended{log_excerpt(self.log)}") from error
        if kind == "error":
            raise content
        return content

    def stop_generation(self, number: int) -> None:
        """Ask the worker to end a partial generation. It does not answer: it may be sending a group now."""
        with self._urgent_lock, contextlib.suppress(OSError):  # a worker that has ended is noticed elsewhere
            self._urgent.send(("stop", number))

    def request(self, name: str, *arguments: Any, timeout: float) -> None:
        """Send a request. If an interrupted one is unanswered, cancel it first."""
        with self._urgent_lock:
            while self._is_busy:
                self._discard(timeout)
        self.send((name, arguments), timeout)
        self._is_busy = True

    def send_chunk(self, chunk: Path | StagedChunk, timeout: float) -> None:
        """Send a chunk of weights, which a request to receive weights precedes."""
        self.send(chunk if isinstance(chunk, Path) else chunk.message(self._cache), timeout)

    def set_tokenizer(self, tokenizer: PreTrainedTokenizerBase, timeout: float) -> None:
        """Send the tokenizer, unless the worker has it."""
        if tokenizer is not self._tokenizer:
            self.call("set_tokenizer", tokenizer, timeout=timeout)
            self._tokenizer = tokenizer

    def answer(self, timeout: float) -> Any:
        """Return the answer to the last request; messages before it are discarded."""
        while True:
            kind, content = self.receive(timeout)
            if kind == "answer":
                return content

    def expect(self, expected: str, timeout: float) -> None:
        """Receive a message, and raise if it is of another kind."""
        kind, _ = self.receive(timeout)
        if kind != expected:
            raise EngineError(f"a process of the pool sent {kind!r}, not {expected!r}")

    def receive(self, timeout: float) -> tuple[str, Any]:
        """Return kind and content of the next message; an error is raised."""
        kind, content = self._receive(timeout)
        if kind == "error":
            raise content
        return kind, content

    def send(self, message: Any, timeout: float) -> None:
        """Send a message."""
        with self._within(timeout):
            self.connection.send(message)

    def interrupt(self) -> None:
        """Ask the worker to cancel its current request, whose messages are discarded from now on."""
        self._is_cancelled = self._is_busy
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGINT)

    def close(self) -> bool:
        """End the process, and return whether it exited by itself. An idle worker exits when its pipe is closed."""
        self._watchdog.stopped.set()
        self.connection.close()
        self._urgent.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(0 if self._is_busy else 10)
        has_exited = self.process.poll() == 0
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
        return has_exited

    def kill(self) -> None:
        """Kill the process."""
        kill_process(self.process)

    def _discard(self, timeout: float) -> None:
        """Discard the next message of a cancelled request, also an error."""
        self._receive(timeout)
        if self._is_busy:
            self.interrupt()  # again: the worker may not have started it at the first interrupt

    def _receive(self, timeout: float) -> tuple[str, Any]:
        with self._within(timeout):
            kind, content = self.connection.recv()
        if kind in ("answer", "error"):
            self._is_busy = self._is_cancelled = False
        return kind, content

    @contextlib.contextmanager
    def _within(self, timeout: float) -> Iterator[None]:
        """Send or receive one message inside; kill the worker at the deadline, or if the message is cut off."""
        self._watchdog.deadline = time.monotonic() + timeout
        try:
            yield
        except (EOFError, OSError) as error:
            if self._watchdog.has_expired:
                raise EngineFailure(
                    f"a process of the pool did not answer for {timeout:g} s{log_excerpt(self.log)}"
                ) from error
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
            code = self.process.poll()
            self.kill()
            ended = "ended" if code is None else f"ended with exit code {code}"
            raise EngineFailure(f"a process of the pool {ended}{log_excerpt(self.log)}") from error
        except (pickle.PicklingError, TypeError, AttributeError):  # not picklable: nothing was sent
            raise
        except BaseException:
            self.kill()  # the message is incomplete
            raise
        finally:
            self._watchdog.deadline = math.inf
