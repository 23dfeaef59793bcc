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
from typing import Any, NoReturn, TypeAlias

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from lgrpo.engines.base import EngineError, RolloutEngine, Sampling
from lgrpo.engines.ledger import Sent
from lgrpo.types import Completion, PolicyWeights, Prompt

Parcel: TypeAlias = "Path | tuple[Contents, Any]"
"""Some tensors: a file in shared memory, or where on the GPU they lie, one after another."""
LaidOut: TypeAlias = "Path | tuple[Contents, Tensor]"
"""The same before they are sent to anyone."""
Contents: TypeAlias = "list[tuple[str, torch.dtype, torch.Size]]"
"""Their names, types and shapes, in order."""

_DEVICE = 6
"""Where among what torch needs to find a tensor again the number of its GPU stands."""


def in_a_row(tensors: dict[str, Tensor]) -> tuple[Contents, Tensor]:
    """Tensors in one piece of memory, which another process opens at once: one by one takes longer than to copy them.

    >>> contents, memory = in_a_row({"a": torch.ones(3, dtype=torch.bfloat16), "b": torch.tensor([[1.0, 2.0]])})
    >>> memory.numel()
    32
    >>> from_a_row(contents, memory)["b"]
    tensor([[1., 2.]])
    """
    contents = [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
    size = sum(_room(tensor.nbytes) for tensor in tensors.values())
    memory = torch.empty(size, dtype=torch.uint8, device=next(iter(tensors.values())).device)
    torch._foreach_copy_(list(from_a_row(contents, memory).values()), list(tensors.values()))
    return contents, memory


def from_a_row(contents: Contents, memory: Tensor) -> dict[str, Tensor]:
    """The tensors, in the memory they were given in."""
    tensors, start = {}, 0
    for name, dtype, shape in contents:
        size = shape.numel() * dtype.itemsize
        tensors[name] = memory[start : start + size].view(dtype).view(shape)
        start += _room(size)
    return tensors


def _room(size: int) -> int:
    """Bytes that so many take up, so that what follows begins where any type may."""
    return size + -size % 16


def laid_out(tensors: dict[str, Tensor], path: Path) -> LaidOut:
    """Some tensors, ready to be sent: a file, or memory of the GPU they are on. To be kept until it was read."""
    if not all(tensor.is_cuda for tensor in tensors.values()):
        save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, path)
        return path
    row = in_a_row(tensors)
    torch.cuda.synchronize()
    return row


def packed(tensors: LaidOut) -> Parcel:
    """For one other process on this machine."""
    return tensors if isinstance(tensors, Path) else (tensors[0], reduce_tensor(tensors[1]))


def unpacked(parcel: Parcel) -> dict[str, Tensor]:
    if isinstance(parcel, Path):
        return load_file(parcel)
    contents, (rebuild, arguments) = parcel
    return from_a_row(contents, rebuild(*_on_own_device(arguments)))


def _on_own_device(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The trainer may count GPUs otherwise: a member sees one only, the same."""
    return (*arguments[:_DEVICE], torch.cuda.current_device(), *arguments[_DEVICE + 1 :])


class Member:
    """What a member does when it is told to; every method is an order."""

    def __init__(self, connection: Connection, engine: RolloutEngine) -> None:
        self._connection = connection
        self._engine = engine
        self._sent = Sent()
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
        begin, has_gone_through = unpacked(first), False

        def tensors() -> Iterator[tuple[str, Tensor]]:
            nonlocal begin, has_gone_through
            yield from begin.items()
            if has_gone_through:
                raise EngineError(f"{type(self._engine).__name__} went through the weights twice")
            has_gone_through, begin = True, {}
            while True:
                self._connection.send(("next", None))
                parcel = self._connection.recv()
                if parcel is None:
                    return
                yield from unpacked(parcel).items()

        self._config = config or self._config
        assert self._config is not None
        weights = PolicyWeights(config=self._config, tensors=tensors)
        self._sent = self._engine._replace(weights, step=0, version=version)

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
    try:
        engine = connection.recv()
        member = Member(connection, engine)
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
    """An error that can be raised in the trainer."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return EngineError(f"{type(error).__name__}: {error}")
    return error
