"""Base class of generated games for one player with a limited number of turns."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

from lgrpo.environments.base import Environment, Turn, TurnError


class Play(NamedTuple):
    """Outcome of a move."""

    observation: str
    has_won: bool = False
    error: TurnError | None = None


class Game(Environment):
    """Game that a model wins or loses. Its rows are generated; a row has all that an episode depends on.

    A row has the rules in the field ``question``, so that ``reset`` has nothing to add, the number of turns in
    ``max_turns``, and the index of its level in ``difficulty``. Winning has reward 1, plus the share of turns that are
    left; losing has reward 0. So pass@k counts games that are won.
    """

    def generate_rows(self, count: int, seed: int) -> list[dict[str, Any]]:
        """Return rows of all levels in turn, determined by the seed. They differ as long as a level has new ones."""
        rng, seen, rows = random.Random(seed), set(), []
        for index in range(count):
            for _ in range(100):
                row = self.generate(index % self.num_levels, rng)
                if (key := repr(row | {"solution": None})) not in seen:
                    break
            seen.add(key)
            rows.append(row | {"difficulty": index % self.num_levels})
        return rows

    @property
    @abstractmethod
    def num_levels(self) -> int:
        """Number of levels, which are ordered by difficulty."""

    @abstractmethod
    def generate(self, level: int, rng: random.Random) -> dict[str, Any]:
        """Return a row of a level: values that JSON can hold, with ``question`` and ``max_turns``."""

    @abstractmethod
    def begin(self, row: Mapping[str, Any]) -> None:
        """Begin the game of a row."""

    @abstractmethod
    def move(self, text: str) -> Play:
        """Make the move that a text describes."""

    def reset(self, row: Mapping[str, Any]) -> None:
        self._max_turns, self._num_turns = int(row["max_turns"]), 0
        self.begin(row)

    def step(self, text: str) -> Turn:
        play = self.move(text)
        self._num_turns += 1
        is_last = self._num_turns >= self._max_turns
        reward = 2 - self._num_turns / self._max_turns if play.has_won else 0.0
        errors = () if play.error is None else (play.error,)
        return Turn(play.observation, reward, play.has_won or is_last, errors)
