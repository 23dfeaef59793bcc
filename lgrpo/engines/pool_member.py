"""The process of an engine in a pool: it does what it is told through a pipe, and ends with it."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from safetensors.torch import save_file
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from lgrpo.engines.base import EngineError, RolloutEngine, Sampling
from lgrpo.engines.ledger import Sent
from lgrpo.engines.pool_parcels import OpenTrays, Parcel
from lgrpo.types import Completion, PolicyWeights, Prompt


class Member:
    """What a member does when it is told to; every method is an order."""

    def __init__(self, connection: Connection, engine: RolloutEngine, trays: OpenTrays) -> None:
        self._connection = connection
        self._engine = engine
        self._sent = Sent()
        self._trays = trays
        self._config: PretrainedConfig | None = None
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._is_generating = False
        self._is_sending = False
        self._is_interrupted = False

    def _interrupt(self, *_: Any) -> None:
        """Nobody waits for this generation any more: it may be told so often. A message is finished first."""
        if not self._is_generating or self._is_interrupted:
            return
        self._is_interrupted = True
        if not self._is_sending:
            raise KeyboardInterrupt

    def receive(self, config: PretrainedConfig | None, version: int, first: Parcel) -> None:
        """Takes weights in, parcel by parcel, and says ``next`` when one is read; without a config, of the last one."""
        begin, has_gone_through = self._trays.unpacked(first), False
        noted: dict[str, int] = {}

        def tensors() -> Iterator[tuple[str, Tensor]]:
            nonlocal begin, has_gone_through
            yield from begin.items()
            if has_gone_through:
                raise EngineError(f"{type(self._engine).__name__} went through the weights twice")
            has_gone_through, begin = True, {}
            while True:
                self._trays.finish()
                self._connection.send(("next", None))
                parcel = self._connection.recv()
                if isinstance(parcel, dict):  # the last thing that comes
                    noted.update(parcel)
                    return
                yield from self._trays.unpacked(parcel).items()

        self._config = config or self._config
        assert self._config is not None
        will_compare = getattr(self._engine, "verify", True)  # else what arrives is all that can be told
        weights = PolicyWeights(config=self._config, tensors=tensors, noted=noted if will_compare else None)
        self._sent = self._engine._replace(weights, step=0, version=version)
        self._trays.finish()

    def checksums(self) -> dict[str, int]:
        return self._engine.held_checksums(self._sent)

    def write_weights(self, path: Path) -> None:
        """Those it holds, as a file."""
        save_file({name: tensor.cpu().contiguous() for name, tensor in self._engine.held_weights().items()}, path)

    def learn(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def generate(
        self,
        prompts: Sequence[Prompt],
        places: Sequence[int],
        num_samples: int,
        sampling: Sampling,
        seed: int,
        held: tuple[int, int],
    ) -> dict[str, float]:
        """Says that it begins, and sends each group as soon as it is there.

        Returns:
            How often the engine failed meanwhile, and recovered.
        """
        engine, (step, version) = self._engine, held
        if engine.version != version:
            raise EngineError(f"a member of the pool holds version {engine.version} of the weights, not {version}")
        assert self._tokenizer is not None
        engine.step, engine.spent = step, False

        def say(word: str, what: Any) -> None:
            self._is_sending = True
            self._connection.send((word, what))
            self._is_sending = False
            if self._is_interrupted:
                raise KeyboardInterrupt

        def give(place: int, group: list[Completion]) -> None:
            say("group", (places[place], group))

        try:
            self._is_interrupted, self._is_generating = False, True
            say("begun", None)
            engine.generate(prompts, num_samples, sampling, seed, self._tokenizer, give)
        finally:
            self._is_generating = False
        met = {**engine.faults, "seconds": engine.recovery_seconds}
        engine.faults.clear()
        engine.recovery_seconds = 0.0
        return met

    def wake(self) -> None:
        self._engine.wake()

    def rest(self, spent: bool) -> None:
        self._engine.spent = spent
        self._engine.rest()


def bare(prompt: Prompt) -> Prompt:
    """A prompt without its row of the dataset, which may be anything."""
    return replace(prompt, row={})


def main() -> None:
    connection, folder = Connection(int(sys.argv[1])), Path(sys.argv[2])
    signal.signal(signal.SIGTERM, lambda *_: leave(folder))  # what it is sent when the trainer is gone
    threading.Thread(target=_leave_with, args=(os.getppid(), folder), daemon=True).start()
    trays = OpenTrays()
    try:
        engine = connection.recv()
        member = Member(connection, engine, trays)
        signal.signal(signal.SIGINT, member._interrupt)
        while True:
            name, arguments = connection.recv()
            try:
                answer = "answer", getattr(member, name)(*arguments)
            except KeyboardInterrupt:
                answer = "error", EngineError("a generation was interrupted")
            except Exception as error:
                answer = "error", portable(error)
            connection.send(answer)
    except (EOFError, OSError):  # the trainer has ended, or wants no more
        trays.clear()
        leave(folder)


def _leave_with(trainer: int, folder: Path) -> NoReturn:
    """A signal is heard between two lines of Python only, and what the main thread is at may be none."""
    while os.getppid() == trainer:
        time.sleep(1)
    leave(folder)


def leave(folder: Path) -> NoReturn:
    """Ends, without its files, and the last one without the pool's."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        if not any(other.is_dir() for other in folder.parent.iterdir()):
            shutil.rmtree(folder.parent, ignore_errors=True)  # weights that were on their way may lie there
    os._exit(0)


def portable(error: Exception) -> Exception:
    """An error that can be raised in the trainer, without what it came from, which may hold on to weights."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return EngineError(f"{type(error).__name__}: {error}")
