"""Rewards that go wrong in every way a reward can."""

from __future__ import annotations

import ctypes
import math
import os
import subprocess
import time
from collections.abc import Sequence

from lgrpo.rewards import BatchReward, Reward
from lgrpo.types import Completion, Prompt


class Hostile(BatchReward):
    """Does what the completion says; else the score is its length."""

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[float]:
        (completion,) = completions
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
                return [7.0]
            case "raise":
                raise RuntimeError("no score today")
            case "nan":
                return [math.nan]
            case "count":
                return [1.0, 2.0]
            case "long error":
                raise RuntimeError("x" * 10**6)
        return [float(len(completion.text))]


class Fussy(Reward):
    """Will not read a seven."""

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
