"""Rewards that fail in every way a reward can."""

from __future__ import annotations

import asyncio
import ctypes
import math
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from lgrpo.rewards import NOT_YET, AsyncReward, BatchReward, Reward, Score
from lgrpo.types import Completion, Prompt


class Hostile(Reward):
    """Does what the completion says; any other completion is scored by its length."""

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Score]:
        scores = super().__call__(prompts, completions)
        return [*scores, 2.0] if completions[0].text == "count" else scores

    def score(self, prompt: Prompt, completion: Completion) -> Score:
        match completion.text:
            case "hang":
                while True:
                    time.sleep(0.01)
            case "hang in C":
                sum(range(10**15))
            case "hang in a child":
                subprocess.run(["sleep", "1000"], check=True)
            case "allocate":
                hoard = []
                while True:
                    hoard.append(bytearray(2**26))
            case "segfault":
                ctypes.string_at(0)
            case "exit":
                os._exit(3)
            case "print":
                for _ in range(1024):
                    print("x" * 2**20)
                return 7.0
            case "print a little":
                print("x" * 2**20)
                return 7.0
            case "print in C":
                subprocess.run(["dd", "if=/dev/zero", "bs=1M", "count=1024"], check=False)
                os.write(1, b"x")
                return 7.0
            case "write a file":
                with tempfile.TemporaryFile() as file:
                    for _ in range(1024):
                        file.write(bytes(2**20))
                return 7.0
            case "raise":
                raise RuntimeError("no score today")
            case "nan":
                return math.nan
            case "fork":
                os.fork()
            case "not yet":
                return NOT_YET
            case "long error":
                raise RuntimeError("x" * 10**6)
        return float(len(completion.text))


class HostileByDigit(Hostile):
    """Fails as the first digit of a completion says; any other completion is scored by its length."""

    FAILURES: ClassVar = {
        "0": ("hang", "timeouts"),
        "1": ("segfault", "crashes"),
        "2": ("allocate", "memory"),
        "3": ("print", "output"),
        "4": ("raise", "errors"),
        "5": ("nan", "errors"),
        "6": ("count", "errors"),
    }

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Score]:
        text, _ = self.FAILURES.get(completions[0].text[:1], (completions[0].text, None))
        return super().__call__(prompts, [replace(completions[0], text=text)])


class Escaping(Reward):
    """Starts processes in sessions of their own, which ignore SIGTERM, and appends their ids to a file.

    ``daemon`` returns afterwards, ``hang`` does not, ``exit`` ends the worker, ``kill`` ends the worker's parent.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def score(self, prompt: Prompt, completion: Completion) -> float:
        for num_forks in (1, 2, 3):
            self._escape(num_forks)
        match completion.text:
            case "hang":
                time.sleep(1000)
            case "exit":
                os._exit(3)
            case "kill":
                os.kill(os.getppid(), signal.SIGKILL)
                time.sleep(1000)
        return 1.0

    def _escape(self, num_forks: int) -> None:
        """Fork several times, each time in a new session, so that the parents of the last process have ended."""
        if first := os.fork():
            if num_forks > 1:
                os.waitpid(first, 0)
            return
        for _ in range(num_forks - 1):
            os.setsid()
            if os.fork():
                os._exit(0)
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with open(self.path, "a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(1000)
        os._exit(0)


class Siblings(BatchReward):
    """Number of siblings it receives; raises for a completion that says so."""

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[float]:
        if any(completion.text == "raise" for completion in completions):
            raise RuntimeError("no score for any of them")
        return [float(len(completions))] * len(completions)


class TooFew(BatchReward):
    """One reward less than completions."""

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[float]:
        return [1.0] * (len(completions) - 1)


class Waiting(AsyncReward):
    """Sleeps before it scores; hangs, blocks the event loop or raises for completions that say so."""

    concurrency = 16

    def __init__(self) -> None:
        self.waiting, self.most = 0, 0

    async def score(self, prompt: Prompt, completion: Completion) -> float:
        match completion.text:
            case "how many at most?":
                return float(self.most)
            case "hang":
                await asyncio.sleep(10**6)
            case "block":
                time.sleep(10**6)
            case "raise":
                raise RuntimeError("no score today")
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        await asyncio.sleep(0.5)
        self.waiting -= 1
        return float(len(completion.text))


class LateThenFails(Reward):
    """Scores of the first prompt are late and then fail; the others succeed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def score(self, prompt: Prompt, completion: Completion) -> Score:
        if prompt.position == 0:
            path = self.folder / str(hash(tuple(completion.token_ids)))
            if path.exists():
                raise ValueError("unknown")
            path.touch()
            return NOT_YET
        return len(completion.token_ids) / 6


class Hoarding(Reward):
    """Keeps 64 MiB for every completion."""

    def __init__(self) -> None:
        self.hoard: list[bytearray] = []

    def score(self, prompt: Prompt, completion: Completion) -> float:
        self.hoard.append(bytearray(2**26))
        return 1.0


class Fussy(Reward):
    """Raises for a completion that contains a seven."""

    def score(self, prompt: Prompt, completion: Completion) -> float:
        if "7" in completion.text:
            raise ValueError("a seven")
        return len(completion.text) / 6


class Unloadable(BatchReward):
    """Cannot be unpickled."""

    def __reduce__(self) -> tuple:
        return (int, ("not a number",))

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[float]:
        return [0.0] * len(completions)


class Unpicklable(Reward):
    """Cannot be pickled."""

    def __init__(self) -> None:
        self.answers = (str(n) for n in range(3))

    def score(self, prompt: Prompt, completion: Completion) -> float:
        return 0.0
