"""Guess the number: the answer to a guess is higher or lower."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any, final

from lgrpo.checks import check_count
from lgrpo.environments.base import TurnError
from lgrpo.environments.games.base import Game, Play

_INTEGER = re.compile(r"(?<![\w.])-?\d{1,18}(?![\w]|\.\d)")


@final
class GuessNumber(Game):
    """Find a number between 1 and a limit. The guess is the last integer of a text.

    >>> game = GuessNumber(limits=[10])
    >>> game.reset({"number": 7, "limit": 10, "max_turns": 4})
    >>> game.step("I try 5.").observation
    'Higher.'
    >>> game.step("7")
    Turn(observation='Right.', reward=1.5, done=True, errors=())
    """

    def __init__(self, limits: Sequence[int] = (10, 30, 100), num_spare_turns: int = 2) -> None:
        """
        Args:
            limits: Largest number of each level.
            num_spare_turns: Turns beyond those that halving the range takes.
        """
        if not limits:
            raise ValueError("limits is empty; give the largest number of each level, such as [10, 100]")
        for limit in limits:
            check_count("limits", limit, at_least=2)
        check_count("num_spare_turns", num_spare_turns, at_least=0)
        self.limits = tuple(limits)
        self.num_spare_turns = num_spare_turns

    @property
    def num_levels(self) -> int:
        return len(self.limits)

    def generate(self, level: int, rng: random.Random) -> dict[str, Any]:
        limit = self.limits[level]
        max_turns = limit.bit_length() + self.num_spare_turns
        question = (
            f"Guess the number I think of. It is between 1 and {limit}. Answer with one number. I say whether mine is "
            f"higher or lower. You have {max_turns} guesses."
        )
        number, guess = rng.randint(1, limit), rng.randint(1, limit)
        # The solution is any guess, so that a warm start teaches the form of an answer, not the game.
        return {"question": question, "number": number, "limit": limit, "max_turns": max_turns, "solution": str(guess)}

    def begin(self, row: Mapping[str, Any]) -> None:
        self._number, self._limit = int(row["number"]), int(row["limit"])

    def move(self, text: str) -> Play:
        found = _INTEGER.findall(text)
        if not found:
            return Play("Answer with one number.", error=TurnError("no_move", f"no number in {text[:100]!r}"))
        guess = int(found[-1])
        if not 1 <= guess <= self._limit:
            observation = f"The number is between 1 and {self._limit}."
            return Play(observation, error=TurnError("impossible_move", f"{guess} is not between 1 and {self._limit}"))
        if guess == self._number:
            return Play("Right.", has_won=True)
        return Play("Higher." if self._number > guess else "Lower.")
