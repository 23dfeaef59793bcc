"""The trainer's end of the pipe to a member of a pool, and how weights go through several of them."""

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
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from lgrpo.engines.base import EngineError, EngineFailure, RolloutEngine, each
from lgrpo.engines.children import kill_process, start_process, telling_lines
from lgrpo.engines.ledger import Sent
from lgrpo.engines.pool_parcels import Known, Tray, Trays, in_a_file
from lgrpo.functional import AT_ONCE, chunks
from lgrpo.types import PolicyWeights

_PARCEL = AT_ONCE
"""Bytes of weights that go to a member together, in the engine's precision: no fewer than it takes at once."""
_COMMAND = """
import os, shutil, signal, sys  # before all that takes long: the trainer may end meanwhile
signal.signal(signal.SIGTERM, lambda *_: (shutil.rmtree(os.path.dirname(sys.argv[2]), True), os._exit(0)))
from lgrpo.engines.pool_member import main
main()
"""


class _Watch(threading.Thread):
    """Looks twice a second whether a message takes longer than it may, and then ends the process at its other end."""

    def __init__(self, kill: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self.until = math.inf
        self.is_late = False
        self.ended = threading.Event()
        self._kill = kill
        self.start()

    def run(self) -> None:
        while not self.ended.wait(0.5):
            if time.monotonic() > self.until:
                self.until, self.is_late = math.inf, True
                self._kill()


class MemberProcess:
    """The trainer's end of the pipe. Nothing here waits for ever."""

    def __init__(self, engine: RolloutEngine, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        self.log = folder / "log"
        self.connection, theirs = Pipe()
        self._is_asked = False
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._config: dict[str, Any] | None = None
        self._known: Known = {}
        """What it knows already, and need not be sent again."""
        with self.log.open("w") as log:
            self.process: subprocess.Popen = start_process(
                [sys.executable, "-c", _COMMAND, str(theirs.fileno()), str(folder)],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        theirs.close()
        self._watch = _Watch(self.kill)
        try:
            self.send(engine, timeout=60)
        except BaseException as error:
            self.close()
            if isinstance(error, pickle.PicklingError | TypeError | AttributeError):
                raise EngineError(f"a {type(engine).__name__} cannot be sent to another process: {error}") from error
            raise

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def call(self, name: str, *arguments: Any, timeout: float) -> Any:
        """Gives an order, and waits for the answer."""
        self.ask(name, *arguments, timeout=timeout)
        return self.answer(timeout)

    def ask(self, name: str, *arguments: Any, timeout: float) -> None:
        """Gives an order. One before it that nobody waited for, since it was interrupted, is ended first."""
        while self._is_asked:
            self._next(timeout)  # for nobody, errors too
            if self._is_asked:
                self.interrupt()  # again: the first time it may not have begun
        self.send((name, arguments), timeout)
        self._is_asked = True

    def give(self, chunk: Path | Tray, config: PretrainedConfig, version: int, number: int, timeout: float) -> None:
        """Some of the weights; with the first of them the order to take them in."""
        parcel = chunk if isinstance(chunk, Path) else chunk.packed(self._known)
        if number == 0:
            settings = config.to_dict()
            known = settings == self._config
            self.ask("receive", None if known else config, version, parcel, timeout=timeout)
            self._config = settings
        else:
            self.send(parcel, timeout)

    def learn(self, tokenizer: PreTrainedTokenizerBase, timeout: float) -> None:
        if tokenizer is not self._tokenizer:
            self.call("learn", tokenizer, timeout=timeout)
            self._tokenizer = tokenizer

    def answer(self, timeout: float) -> Any:
        """The answer to the last order; what comes before it is for nobody."""
        while True:
            word, what = self.hear(timeout)
            if word == "answer":
                return what

    def expect(self, wanted: str, timeout: float) -> None:
        word, _ = self.hear(timeout)
        if word != wanted:
            raise EngineError(f"a process of the pool said {word!r}, not {wanted!r}")

    def hear(self, timeout: float) -> tuple[str, Any]:
        """The next thing it says; its errors are raised."""
        word, what = self._next(timeout)
        if word == "error":
            raise what
        return word, what

    def send(self, what: Any, timeout: float) -> None:
        with self._within(timeout):
            self.connection.send(what)

    def interrupt(self) -> None:
        """It is to leave what it is at."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGINT)

    def _next(self, timeout: float) -> tuple[str, Any]:
        with self._within(timeout):
            word, what = self.connection.recv()
        if word in ("answer", "error"):
            self._is_asked = False
        return word, what

    @contextlib.contextmanager
    def _within(self, timeout: float) -> Iterator[None]:
        """One message, whole, within a time; else the process ends, and nobody waits for the rest of it."""
        self._watch.until = time.monotonic() + timeout
        try:
            yield
        except (EOFError, OSError) as error:
            if self._watch.is_late:
                raise EngineFailure(
                    f"a process of the pool said nothing for {timeout:g} s{telling_lines(self.log)}"
                ) from error
            raise self._gone() from error
        except (pickle.PicklingError, TypeError, AttributeError):  # what was to be sent cannot be: nothing went
            raise
        except BaseException:
            self.kill()  # half a message has gone or come
            raise
        finally:
            self._watch.until = math.inf

    def close(self) -> bool:
        """Ends it: a process whose pipe is closed goes by itself, unless it is at something. Whether it did."""
        self._watch.ended.set()
        self.connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(0 if self._is_asked else 10)
        went = self.process.poll() == 0
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
        return went

    def kill(self) -> None:
        kill_process(self.process)

    def _gone(self) -> EngineFailure:
        try:
            code = f" with exit code {self.process.wait(5)}"
        except subprocess.TimeoutExpired:
            code = ""
        self.kill()
        return EngineFailure(f"a process of the pool ended{code}{telling_lines(self.log)}")


def hand_over(
    members: Sequence[MemberProcess],
    weights: PolicyWeights,
    sent: Sent,
    version: int,
    trays: Trays,
    folder: Path,
    timeout: float,
) -> dict[MemberProcess, EngineFailure]:
    """The same weights for several members, a quarter of a gigabyte at a time. Who fails is left out.

    While members read one parcel the next is made. A member that asks for more may not be done with the last of the
    tensors it has taken (``AT_ONCE``): so the parcel it asks after stays until it asks again.
    Of a policy that is spread over ranks, all ranks gather each tensor: so it goes on to the last in any case.

    Args:
        members: Who is to have them.
        weights: Of the policy.
        sent: Notes what goes.
        version: Which sync it is.
        trays: Where weights lie meanwhile that are on a GPU.
        folder: For files, where weights are not on a GPU.
        timeout: Seconds each message may take.
    """
    failures: dict[MemberProcess, EngineFailure] = {}
    files: list[Path] = []
    unnoted: dict[str, Tensor] = {}

    def lay_out(number: int, chunk: dict[str, Tensor]) -> Path | Tray:
        if all(tensor.is_cuda for tensor in chunk.values()):
            tray = trays.fill(number, chunk, sent.dtype)
            torch.cuda.synchronize()
            return tray
        files.append(folder / f"weights-{number}.safetensors")
        return in_a_file(dict(sent.through(chunk.items())), files[-1])

    def give(number: int, parcel: Path | Tray) -> None:
        each(members, failures, lambda member: member.give(parcel, weights.config, version, number, timeout))

    def note() -> None:
        if unnoted:
            sent.note(unnoted)
            unnoted.clear()

    def wait_until_read() -> None:
        each(members, failures, lambda member: member.expect("next", timeout))
        for path in files[:-1]:
            path.unlink(missing_ok=True)

    try:
        for number, chunk in enumerate(chunks(weights, _PARCEL, sent.dtype)):
            parcel = lay_out(number, chunk)
            chunk.clear()  # before more of them are made
            if number:
                wait_until_read()
            give(number, parcel)
            if isinstance(parcel, Tray):  # noted while it is read, and two at a time, since to begin takes longest
                unnoted |= parcel.tensors
            if number % 2:
                note()
        note()
        wait_until_read()
        noted = sent.checksums
        each(members, failures, lambda member: member.send(noted, timeout))
        each(members, failures, lambda member: member.answer(timeout))
    finally:
        for path in files:
            path.unlink(missing_ok=True)
    if torch.cuda.is_available():
        torch.cuda.ipc_collect()  # trays that were too small
    return failures
