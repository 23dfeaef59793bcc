"""Environments that write down what they are told. A module of its own, because processes import it quickly."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import uuid
from pathlib import Path

from lgrpo.environments import Environment, Turn


class Counting(Environment):
    """Answers each turn with its number, and ends after the third."""

    def reset(self, row):
        self.turn = 0

    def step(self, text):
        self.turn += 1
        return Turn(f"{self.turn}>", reward=float(self.turn), done=self.turn == 3)


class Diary(Counting):
    """Writes a file for each episode: one line for each call, with the process and the text."""

    def __init__(self, folder):
        self.folder = str(folder)

    def reset(self, row):
        self.name = uuid.uuid4().hex
        self.write("reset")
        super().reset(row)

    def step(self, text):
        self.write("step", text)
        return super().step(text)

    def truncate(self):
        self.write("truncate")
        return 0.0

    def write(self, method, text=""):
        with open(Path(self.folder) / self.name, "a") as file:
            file.write(json.dumps([method, os.getpid(), text]) + "\n")


class Talkative(Diary):
    """Says much in each of up to eight turns, so that contexts overflow. Rewards low digits."""

    def step(self, text):
        self.write("step", text)
        self.turn += 1
        reward = sum(c in "01234" for c in text) / 6
        return Turn(f"{self.turn}{text[:1]}2345>", reward, done=self.turn == 8)


class UnevenlyTalkative(Talkative):
    """May end after the fourth turn, so that groups do not end together, however fast the process is."""

    def step(self, text):
        turn = super().step(text)
        return turn._replace(done=turn.done or (self.turn >= 4 and text[:1] in tuple("01234")))


class Uneven(Diary):
    """Ends when a text begins with a low digit, so that episodes have very different numbers of turns."""

    def step(self, text):
        self.write("step", text)
        self.turn += 1
        is_low = text[:1] in tuple("01")
        return Turn(f"{self.turn}>", reward=float(is_low), done=is_low or self.turn == 6)


class Thoughtful(Uneven):
    """Has asynchronous steps. A second one kills the process whose id is in a file beside the folder, and waits."""

    async def step(self, text):
        answer = super().step(text)
        await asyncio.sleep(0.01)
        victim = Path(f"{self.folder}.victim")
        if self.turn > 1 and victim.exists():
            os.kill(int(victim.read_text()), signal.SIGKILL)
            await asyncio.sleep(60)
        self.write("answer", text)
        return answer


def diaries(folder):
    """Return the calls of every episode, and check that each was in one process."""
    found = [[json.loads(line) for line in path.read_text().splitlines()] for path in sorted(Path(folder).iterdir())]
    for calls in found:
        assert len({pid for _, pid, _ in calls}) == 1, "an episode was in two processes"
        assert [method for method, _, _ in calls].count("reset") == 1
        assert calls[0][0] == "reset"
    return found


def told(calls):
    """Return the texts of an episode's steps."""
    return [text for method, _, text in calls if method == "step"]
