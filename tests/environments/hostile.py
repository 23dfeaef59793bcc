"""Environments that fail in every way an environment can."""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import math
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lgrpo.environments import Environment, Observation, Turn, TurnError


def misbehave(what: str) -> Any:
    """Fail in a way; return None if there is no such way."""
    match what:
        case "hang":
            while True:
                time.sleep(0.01)
        case "hang in C":
            sum(range(10**15))
        case "hang in a child":
            subprocess.run(["sleep", "1000"], check=True)
        case "exit":
            os._exit(3)
        case "sys.exit":
            raise SystemExit(3)
        case "segfault":
            ctypes.string_at(0)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "allocate":
            hoard = []
            while True:
                hoard.append(bytearray(2**26))
        case "print":
            for _ in range(1024):
                print("x" * 2**20)
        case "write a file":
            with tempfile.TemporaryFile() as file:
                for _ in range(1024):
                    file.write(bytes(2**20))
        case "write to the pipe":
            for descriptor in range(3, 20):
                try:
                    os.write(descriptor, b"\0\0\0\2{}" * 3)
                except OSError:
                    continue
        case "return too much":
            return Turn("x" * 2**21)
        case "divide":
            return 1 / 0
        case "unprintable":
            raise Unprintable
        case "nan":
            return Turn(reward=math.nan)
        case "a word as reward":
            return Turn(reward="1")  # type: ignore[arg-type]
        case "a word as done":
            return Turn(done="yes")  # type: ignore[arg-type]
        case "no turn":
            return "text"
        case "a number as observation":
            return Turn(5)  # type: ignore[arg-type]
        case "a message without a role":
            return Turn([{"content": "text"}])
        case "a message that is not JSON":
            return Turn([{"role": "user", "content": "text", "image": object()}])
        case "words as errors":
            return Turn(errors=["text"])  # type: ignore[list-item]
        case "fork":
            os.fork()
        case "fork bomb":
            for _ in range(6):  # 64 processes
                os.fork()
    return None


class Unprintable(Exception):
    """Error that has no text."""

    def __str__(self) -> str:
        raise RuntimeError


class Hostile(Environment):
    """Counts its steps and does what the text says; ``reset`` does what the row says."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.name = ""

    def reset(self, row: Mapping[str, Any]) -> Observation | None:
        self.texts, self.name = [], row.get("name", "")
        if (result := misbehave(row.get("reset", ""))) is not None:
            return result
        return row.get("observation")

    def step(self, text: str) -> Turn:
        if (result := misbehave(text)) is not None:
            return result
        self.texts.append(text)
        return Turn(f"{self.name}: {' '.join(self.texts)}", float(len(self.texts)), text == "bye")

    def truncate(self) -> float:
        if (result := misbehave(self.texts[-1])) is not None:
            return result
        return -float(len(self.texts))


class Varied(Hostile):
    """Returns valid results of all types."""

    def step(self, text: str) -> Turn:
        turn = super().step(text)
        match text:
            case "messages":
                content = [{"type": "text", "text": "b"}]
                return turn._replace(
                    observation=({"role": "user", "content": "a"}, {"role": "tool", "content": content})
                )
            case "errors":
                return turn._replace(errors=(TurnError("unknown_tool", "There is no tool."),), reward=True)
        return turn


class Waiting(Environment):
    """Async environment: ``reset`` starts a clock, which ticks between steps as well."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.clock: asyncio.Task[None] | None = None
        self.num_ticks = 0

    async def reset(self, row: Mapping[str, Any]) -> Observation | None:
        if self.clock is None:
            self.clock = asyncio.create_task(self._tick())
        self.num_ticks = 0
        await asyncio.sleep(self.seconds)
        return row["name"]

    async def step(self, text: str) -> Turn:
        await asyncio.sleep(self.seconds)
        match text:
            case "hang":
                await asyncio.sleep(1000)
            case "block":
                time.sleep(1000)
            case "divide":
                return Turn(reward=1 / 0)
            case "ticks":
                return Turn(reward=self.num_ticks)
        return Turn(text)

    async def _tick(self) -> None:
        for self.num_ticks in itertools.count():
            await asyncio.sleep(0.01)


class HalfAsync(Environment):
    """``reset`` is sync and uses an event loop of its own; ``step`` returns an awaitable without being async."""

    def reset(self, row: Mapping[str, Any]) -> Observation | None:
        return asyncio.run(self._later(row["name"]))

    def step(self, text: str) -> Any:
        return self._later(Turn(text))

    async def _later(self, value: Any) -> Any:
        await asyncio.sleep(0.01)
        return value


class Escaping(Environment):
    """Leaves a process behind, in a session of its own, and appends its id to a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def reset(self, row: Mapping[str, Any]) -> None:
        return None

    def step(self, text: str) -> Turn:
        if text == "leave" and (first := os.fork()):
            os.waitpid(first, 0)
        elif text == "leave":
            os.setsid()
            if os.fork():
                os._exit(0)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            with open(self.path, "a") as file:
                file.write(f"{os.getpid()}\n")
            time.sleep(1000)
            os._exit(0)
        return Turn(str(os.getpid()))


class Reused(Environment):
    """Returns its process id and the number of its resets. Fails in a reset after the first, if the row says so."""

    def __init__(self) -> None:
        self.num_resets = 0
        self.hoard: list[bytearray] = []

    def reset(self, row: Mapping[str, Any]) -> Observation | None:
        self.num_resets += 1
        if self.num_resets > 1:
            misbehave(row.get("again", ""))
        self.hoard += [bytearray(row.get("keep", 0))]
        return f"{os.getpid()} {self.num_resets}"

    def step(self, text: str) -> Turn:
        return Turn(str(os.getpid()))


class Overlapping(Environment):
    """Counts the calls that run at the same time, by the files in a folder."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder = folder
        self.seconds = seconds

    def reset(self, row: Mapping[str, Any]) -> None:
        return None

    def step(self, text: str) -> Turn:
        own = self.folder / str(os.getpid())
        own.touch()
        time.sleep(self.seconds)
        count = len(list(self.folder.iterdir()))
        own.unlink()
        return Turn(reward=count)


class Unloadable(Hostile):
    """Cannot be unpickled."""

    def __reduce__(self) -> tuple:
        return (int, ("not a number",))


class Unpicklable(Hostile):
    """Cannot be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.numbers = (n for n in range(3))
