"""The worker process of a pool: runs one engine, and serves the requests that come through a pipe."""

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
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from lgrpo.engines.base import RolloutEngine
from lgrpo.engines.completions import Generation, Sampling
from lgrpo.engines.manifest import WeightManifest
from lgrpo.engines.pool.cuda_buffers import MappedBuffers, write_file
from lgrpo.engines.recovery import EngineError, Faults
from lgrpo.types import Completion, Prompt
from lgrpo.weights import PolicyWeights


class WorkerRequests:
    """The requests that a worker serves, one public method each.

    The trainer sends the name of a method and its arguments. The return value is sent back as ``("answer", value)``,
    an exception as ``("error", exception)``. ``receive_weights`` and ``generate`` send further messages before that.
    Requests through ``urgent``, a second pipe, are also served between the decoding steps of a generation.
    """

    def __init__(
        self, connection: Connection, urgent: Connection, engine: RolloutEngine, buffers: MappedBuffers
    ) -> None:
        self._connection = connection
        self._urgent = urgent
        self._engine = engine
        engine.on_step = self.serve_urgent
        self._buffers = buffers
        self._manifest = WeightManifest()
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._generation_number = self._last_stopped = 0
        self._is_generating = False
        self._is_sending = False
        self._is_interrupted = False

    def receive_weights(self, config: PretrainedConfig, step: int, version: int) -> None:
        """Replace the engine's weights by the chunks that follow; send ``next`` when a chunk is read.

        After the last chunk comes a dictionary with all checksums.
        """
        chunk, is_consumed = self._buffers.tensors_of(self._connection.recv()), False
        checksums: dict[str, int] = {}

        def tensors() -> Iterator[tuple[str, Tensor]]:
            nonlocal chunk, is_consumed
            yield from chunk.items()
            if is_consumed:
                raise EngineError(f"{type(self._engine).__name__} iterated over the weights twice")
            is_consumed, chunk = True, {}
            while True:
                self._buffers.synchronize()
                self._connection.send(("next", None))
                message = self._connection.recv()
                if isinstance(message, dict):
                    checksums.update(message)
                    return
                yield from self._buffers.tensors_of(message).items()

        # Checksums of the received tensors are computed only if ``checksums`` returns them.
        known = checksums if self._engine.verify else None
        weights = PolicyWeights(config=config, tensors=tensors, checksums=known)
        self._manifest = self._engine.replace_weights(weights, step, version)
        self._buffers.synchronize()

    def checksums(self) -> dict[str, int]:
        """Return checksums of the engine's weights; of the received tensors if the engine does not verify."""
        return self._engine.held_checksums(self._manifest) if self._engine.verify else self._manifest.checksums

    def write_weights(self, path: Path) -> None:
        """Write the engine's weights to a file."""
        write_file(self._engine.held_weights(), path)

    def set_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Set the tokenizer of all following generations."""
        self._tokenizer = tokenizer

    def generate(
        self,
        prompts: Sequence[Prompt],
        indices: Sequence[int],
        num_samples: int,
        sampling: Sampling,
        seed: int,
        version: int,
        begun: Sequence[list[Completion]] | None = None,
        number: int = 0,
    ) -> Faults:
        """Send ``started``, then ``group`` with a prompt's index and completions as soon as these are sampled.

        With ``begun`` the generation is partial: it continues these completions, and at its end, or when it is stopped,
        sends ``unfinished`` with those that are; ``number`` tells it from others. Returns the engine's faults in this
        generation.
        """
        self._generation_number = number
        engine, before = self._engine, replace(self._engine.faults)
        if engine.state.version != version:
            raise EngineError(
                f"a worker of the pool holds version {engine.state.version} of the weights, not {version}"
            )
        assert self._tokenizer is not None

        def send(kind: str, content: Any) -> None:
            self._is_sending = True
            self._connection.send((kind, content))
            self._is_sending = False
            if self._is_interrupted:
                raise KeyboardInterrupt

        def send_group(index: int, group: list[Completion]) -> None:
            send("group", (indices[index], group))

        try:
            self._is_interrupted, self._is_generating = False, True
            send("started", None)
            if begun is None:
                engine.generate(prompts, num_samples, sampling, seed, self._tokenizer, send_group)
            else:
                settings = num_samples, sampling, seed, self._tokenizer, send_group
                generation = Generation(prompts, *settings, *engine.require_weights(), is_partial=True)
                generation.begun, generation.is_stopped = dict(enumerate(begun)), number == self._last_stopped
                engine.generate_part(generation)
                for index, group in generation.unfinished.items():
                    send("unfinished", (indices[index], group))
        finally:
            self._is_generating = False
        return engine.faults - before

    def wake(self) -> None:
        """Wake the engine."""
        self._engine.wake()

    def sleep(self, exhausted: bool) -> None:
        """Let the engine sleep; without its weights if the cycle is exhausted."""
        if exhausted:
            self._engine.finish_cycle()
        self._engine.sleep()

    def serve(self, connection: Connection) -> None:
        """Serve the next request of a pipe."""
        name, arguments = connection.recv()
        if name == "stop":
            self._last_stopped = arguments
            if arguments == self._generation_number:  # otherwise it comes too late, or too early
                self._engine.stop()
            return
        try:
            answer = "answer", getattr(self, name)(*arguments)
        except KeyboardInterrupt:
            answer = "error", EngineError("a generation was interrupted")
        except Exception as error:
            answer = "error", portable(error)
        connection.send(answer)

    def serve_urgent(self) -> None:
        """Serve the urgent requests that have arrived."""
        while self._urgent.poll():
            self._is_sending = True
            self.serve(self._urgent)
            self._is_sending = False
            if self._is_interrupted and self._is_generating:
                raise KeyboardInterrupt

    def _interrupt(self, *_: Any) -> None:
        """Cancel the current generation, after the message that is being sent. Later signals are ignored."""
        if not self._is_generating or self._is_interrupted:
            return
        self._is_interrupted = True
        if not self._is_sending:
            raise KeyboardInterrupt


def main() -> None:
    """Serve requests until the pipe is closed."""
    connection, folder, urgent = Connection(int(sys.argv[1])), Path(sys.argv[2]), Connection(int(sys.argv[3]))
    signal.signal(signal.SIGTERM, lambda *_: exit_worker(folder))  # sent when the trainer is gone
    threading.Thread(target=_exit_with_parent, args=(os.getppid(), folder), daemon=True).start()
    buffers = MappedBuffers()
    try:
        engine = connection.recv()
        engine.import_packages()
        requests = WorkerRequests(connection, urgent, engine, buffers)
        signal.signal(signal.SIGINT, requests._interrupt)
        while True:
            wait([connection, urgent])
            requests.serve_urgent()
            if connection.poll():  # a generation serves urgent requests itself
                requests.serve(connection)
    except (EOFError, OSError):  # the trainer has ended, or closed the pipe
        buffers.clear()
        exit_worker(folder)


def _exit_with_parent(parent: int, folder: Path) -> NoReturn:
    """Exit when the trainer is gone, even if the main thread is in native code and cannot handle a signal."""
    while os.getppid() == parent:
        time.sleep(1)
    exit_worker(folder)


def exit_worker(folder: Path) -> NoReturn:
    """Delete the worker's files, and those of the pool if it is the last worker, and exit."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        if not any(other.is_dir() for other in folder.parent.iterdir()):
            shutil.rmtree(folder.parent, ignore_errors=True)  # it may contain weights of an unfinished sync
    os._exit(0)


def portable(error: Exception) -> Exception:
    """Return a picklable copy of an error, without its traceback, which may keep weights alive."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return EngineError(f"{type(error).__name__}: {error}")
